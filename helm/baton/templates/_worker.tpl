{{/* (dict "root" $ "role" "prefill" "part" VALUES): the pod of one worker. The pod is a node of Ray with room for just this worker. */}}
{{- define "baton.workerPod" -}}
{{- $usesGpus := eq .root.Values.device "cuda" -}}
metadata:
  labels:
    {{- include "baton.selectorLabels" (dict "root" .root "component" .role) | nindent 4 }}
    {{- with .part.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .part.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.fullname" .root }}-worker
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add (include "baton.drainSeconds" .root) .root.Values.drain.slackSeconds }}
  {{- include "baton.placement" (dict "root" .root "component" .role "part" (merge (dict "usesGpus" $usesGpus) .part)) | nindent 2 }}
  {{- with include "baton.fetchContainer" (dict "root" .root "part" .part) }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-worker
      {{- include "baton.container" .root | nindent 6 }}
      env:
        {{- include "baton.env" .root | nindent 8 }}
        {{- include "baton.podAddress" .root | nindent 8 }}
        {{- if $usesGpus }}
        - {name: TRITON_CACHE_DIR, value: {{ include "baton.kernelCache" . }}}
        {{- end }}
        {{- with .part.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: raylet, containerPort: 6380}
        - {name: baton-metrics, containerPort: {{ .root.Values.metrics.port }}}
      lifecycle:
        preStop:
          exec:
            command: [/bin/sh, -c, {{ printf "exec %s" (include "baton.drainCommand" .root) | quote }}]
      # These two probes check only that the pod is a node of Ray, which it is soon after its start. They do not check the
      # worker in it: the controller restarts a worker.
      startupProbe:
        tcpSocket: {port: raylet}
        periodSeconds: 2
        failureThreshold: 90
      livenessProbe:
        tcpSocket: {port: raylet}
        periodSeconds: 10
        failureThreshold: 6
      # A worker opens this port when it has loaded its model. A worker can be reached before it is ready; budgets
      # and `readyWorkerReplicas` count by it. With autoscaling, a pod that no worker has taken yet is not ready.
      readinessProbe:
        tcpSocket: {port: baton-metrics}
        periodSeconds: 5
      resources:
        {{- include "baton.workerResources" (dict "root" .root "part" .part "usesGpus" $usesGpus) | nindent 8 }}
      volumeMounts:
        {{- include "baton.scratchMounts" .root | nindent 8 }}
        - {name: ray-logs, mountPath: /tmp/ray}
        - {name: shared-mem, mountPath: /dev/shm}
        {{- if $usesGpus }}
        - {name: kernels, mountPath: {{ include "baton.kernelCache" . }}}
        {{- end }}
        {{- with include "baton.modelMount" .root }}
        {{- . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "baton.scratchVolumes" .root | nindent 4 }}
    - name: ray-logs
      emptyDir: {}
    - name: shared-mem
      emptyDir: {medium: Memory, sizeLimit: {{ .part.shmSize }}}
    {{- if $usesGpus }}
    - name: kernels
      {{- .root.Values.gpu.kernelCache | default (dict "emptyDir" (dict)) | toYaml | nindent 6 }}
    {{- end }}
    {{- with include "baton.modelVolumes" .root }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The worker's resources, with a GPU for each rank as a limit. Kubernetes sets the request of GPUs to their limit. */}}
{{- define "baton.workerResources" -}}
{{- $resources := .part.resources | default dict | deepCopy -}}
{{- if .usesGpus -}}
{{- $gpus := dict .root.Values.gpu.resourceName (int .part.tensorParallel) -}}
{{- $_ := set $resources "limits" (merge $gpus (index $resources "limits" | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* The folder for compiled kernels. It is the same in all pods, since Triton stores whole paths of files in it. */}}
{{- define "baton.kernelCache" -}}/var/cache/baton-kernels{{- end }}

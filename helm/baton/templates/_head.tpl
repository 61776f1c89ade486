{{/* The pod of Ray's head, with the controller beside it. */}}
{{- define "baton.headPod" -}}
metadata:
  labels:
    {{- include "baton.selectorLabels" (dict "root" . "component" "head") | nindent 4 }}
    {{- with .Values.rayHead.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed configuration makes a new fleet. Changed numbers of workers do not: the controller reads them again.
    checksum/fleet-config: {{ include "baton.fleetIdentity" . | sha256sum }}
    {{- with .Values.rayHead.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "baton.fullname" . }}-head
  # Only Ray's autoscaler, which KubeRay puts beside the head, calls the API server. But all containers of this pod
  # get the token.
  automountServiceAccountToken: {{ .Values.autoscaling.workers.enabled }}
  # The head outlives workers that begin to drain at the same time, as all workers do in an upgrade by Recreate.
  terminationGracePeriodSeconds: {{ add (include "baton.headWaitSeconds" .) (include "baton.drainSeconds" .) .Values.drain.slackSeconds }}
  # Ray knows its drivers, of which the controller is one, by their process ids.
  shareProcessNamespace: true
  {{- include "baton.placement" (dict "root" . "component" "head" "part" .Values.rayHead) | nindent 2 }}
  initContainers:
    {{- with include "baton.fetchContainer" (dict "root" . "skip" "*.safetensors") }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- include "baton.fleetContainer" . | nindent 4 }}
  containers:
    - name: ray-head
      {{- include "baton.container" . | nindent 6 }}
      env:
        {{- include "baton.env" . | nindent 8 }}
        # With these four settings, Ray notices a lost node within seconds instead of a minute.
        - {name: RAY_health_check_initial_delay_ms, value: "0"}
        - {name: RAY_health_check_period_ms, value: "1000"}
        - {name: RAY_health_check_timeout_ms, value: "2000"}
        - {name: RAY_health_check_failure_threshold, value: "4"}
        # By default, Ray would wait 30 s for the controller to leave this node. But the controller stays.
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
        {{- include "baton.podAddress" . | nindent 8 }}
        {{- with .Values.rayHead.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: gcs, containerPort: 6379}
      lifecycle:
        preStop:
          exec:
            # During the pause, workers that end together with the head tell the controller so. The command fails if all
            # of them have ended.
            command:
              - /bin/sh
              - -c
              - {{ printf "sleep %s; %s || true" (include "baton.headWaitSeconds" .) (include "baton.drainCommand" .) | quote }}
      startupProbe:
        tcpSocket: {port: gcs}
        periodSeconds: 2
        failureThreshold: 90
        terminationGracePeriodSeconds: 30
      # By default, KubeRay would use probes that ask the dashboard. If Ray hangs, this probe ends the pod with a short
      # grace period, so that the preStop hook has little time.
      livenessProbe:
        tcpSocket: {port: gcs}
        periodSeconds: 10
        failureThreshold: 6
        terminationGracePeriodSeconds: 30
      readinessProbe:
        tcpSocket: {port: gcs}
        periodSeconds: 5
      resources:
        {{- toYaml .Values.rayHead.resources | nindent 8 }}
      volumeMounts:
        {{- include "baton.headMounts" . | nindent 8 }}
  volumes:
    {{- include "baton.scratchVolumes" . | nindent 4 }}
    # The autoscaler that KubeRay adds uses the volumes with these two names, too.
    - name: ray-logs
      emptyDir: {}
    - name: shared-mem
      emptyDir: {medium: Memory, sizeLimit: 256Mi}
    - name: config
      configMap:
        name: {{ include "baton.fullname" . }}-fleet
    {{- with include "baton.modelVolumes" . }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "baton.headWaitSeconds" -}}10{{- end }}

{{/* The controller, as a native sidecar. Kubernetes restarts a sidecar when it ends; KubeRay forbids this for ordinary containers if
Ray's autoscaler runs. A sidecar also outlives Ray's own container when the pod ends. There is no readiness probe: workers reach Ray
only through a head that is ready, and the controller would be ready only when it has workers. There is no liveness probe either: a
connection without a message counts as an unknown client, and the kernel would accept the connection even if the process hangs. A
process that ends is restarted without a probe. */}}
{{- define "baton.fleetContainer" -}}
- name: fleet
  restartPolicy: Always
  {{- include "baton.container" . | nindent 2 }}
  command: [baton, fleet, /etc/baton/baton.yaml]
  env:
    {{- include "baton.env" . | nindent 4 }}
    - {name: RAY_AUTH_MODE, value: token}
    - name: RAY_AUTH_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ include "baton.rayTokenName" . | quote }}
          key: auth_token
    # Without Ray, the controller can neither serve nor end by itself. So Ray's library ends it after 10 s. Then it is
    # restarted, unless its pod ends.
    - {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "10"}
    {{- with .Values.rayHead.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: fleet, containerPort: {{ .Values.controller.port }}}
  resources:
    {{- toYaml .Values.controller.resources | nindent 4 }}
  volumeMounts:
    {{- include "baton.headMounts" . | nindent 4 }}
    - {name: config, mountPath: /etc/baton, readOnly: true}
    {{- with include "baton.modelMount" . }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Ray and its driver find each other in /tmp/ray and /dev/shm. */}}
{{- define "baton.headMounts" -}}
{{- include "baton.scratchMounts" . }}
- {name: ray-logs, mountPath: /tmp/ray}
- {name: shared-mem, mountPath: /dev/shm}
{{- end }}

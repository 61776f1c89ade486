{{/* The pod of Ray's head, with the controller beside it. */}}
{{- define "baton.headPod" -}}
metadata:
  labels:
    {{- include "baton.selectorLabels" (dict "root" . "component" "head") | nindent 4 }}
    {{- with .Values.rayHead.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Another configuration is another fleet. How many workers there are to be the controller reads again.
    checksum/fleet-config: {{ include "baton.fleetIdentity" . | sha256sum }}
    {{- with .Values.rayHead.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "baton.fullname" . }}-head
  # Ray's autoscaler, which KubeRay puts beside the head, talks to the API server, and no other container does,
  # though all containers of this pod get the token.
  automountServiceAccountToken: {{ .Values.autoscaling.workers.enabled }}
  # It outlives workers that begin to drain at the same time, as all do in an upgrade by Recreate.
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
        # A node that is gone is noticed within seconds, not a minute.
        - {name: RAY_health_check_initial_delay_ms, value: "0"}
        - {name: RAY_health_check_period_ms, value: "1000"}
        - {name: RAY_health_check_timeout_ms, value: "2000"}
        - {name: RAY_health_check_failure_threshold, value: "4"}
        # By itself, Ray would wait 30 s for the controller to leave its node, which it does not.
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
            # First, workers that end together with the head tell the controller so. The command fails if all have ended.
            command:
              - /bin/sh
              - -c
              - {{ printf "sleep %s; %s || true" (include "baton.headWaitSeconds" .) (include "baton.drainCommand" .) | quote }}
      startupProbe:
        tcpSocket: {port: gcs}
        periodSeconds: 2
        failureThreshold: 90
        terminationGracePeriodSeconds: 30
      # KubeRay would put its own here, which ask the dashboard. A Ray that hangs delays no pod: its hook has little time.
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
    # Under these names KubeRay lets its autoscaler share them.
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

{{/* A native sidecar: it is started again when it ends, which KubeRay forbids containers where Ray's autoscaler runs, and it
outlives Ray's own container when the pod ends. It has no readiness of its own, since workers reach Ray only through a head
that is ready, and the controller is ready only when it has workers. Nor has it a liveness probe: a connection that says nothing
counts as an unknown client, and the kernel would answer for a process that hangs; one that ends is started again. */}}
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
    # Without Ray it can neither serve nor end by itself. It is started again, unless its pod ends.
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

{{/* Parts that several kinds of pods have in common. */}}

{{/* Seconds that a worker may take to drain, by docs/operations.md. */}}
{{- define "baton.drainSeconds" -}}
{{- with .Values.drain }}{{ add .timeoutSeconds .leaseSeconds .unresponsiveSeconds 4 }}{{ end }}
{{- end }}

{{/* A command for a shell, which inserts the pod's address. On the head's node, the command waits for all workers that drain. */}}
{{- define "baton.drainCommand" -}}
baton drain --node "$POD_IP" --fleet-address {{ include "baton.fleetAddress" . }} --timeout {{ include "baton.drainSeconds" . }}
{{- end }}

{{/* (dict "root" $ "component" NAME "part" VALUES): where a pod may go, and how important it is. */}}
{{- define "baton.placement" -}}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .part.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := .part.tolerations }}
{{- if .part.usesGpus }}
{{- $tolerations = prepend $tolerations (dict "key" .root.Values.gpu.resourceName "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- with .part.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selectorLabels" . | nindent 8 }}
  {{- end }}
{{- end }}

{{/* The image and the rights of a container. */}}
{{- define "baton.container" -}}
image: {{ include "baton.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.containerSecurityContext | nindent 2 }}
{{- end }}

{{- define "baton.podAddress" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{/* The cluster secret is in the environment: a mounted file would belong to root, and Baton accepts only a file of its own user. */}}
{{- define "baton.env" -}}
- name: BATON_CLUSTER_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "baton.clusterSecretName" . | quote }}
      key: cluster-secret
{{- if include "baton.isOfHub" . }}
{{- if include "baton.hasModelVolume" . }}
- {name: HF_HOME, value: {{ printf "%s/huggingface" .Values.model.mountPath | quote }}}
{{- end }}
{{- with .Values.model.hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .Values.model.hub.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether model.path is a name of the Hub. */}}
{{- define "baton.isOfHub" -}}{{- include "baton.isHubName" .Values.model.path -}}{{- end }}

{{/* Whether a text is a name of the Hub, as baton/hub_name.py reads it. */}}
{{- define "baton.isHubName" -}}
{{- $part := "[A-Za-z0-9_][A-Za-z0-9._-]*" -}}
{{- if regexMatch "^[^:]*\\.gguf$" . -}}
{{- else if regexMatch (printf "^%s/%s(@[^@:\\s]+)?(:[^@:\\s]+)?$" $part $part) . -}}yes{{- end -}}
{{- end }}

{{/* The model's name for clients. */}}
{{- define "baton.servedModel" -}}
{{- if include "baton.isOfHub" . -}}
{{- regexReplaceAll "@[^:]*" .Values.model.path "" -}}
{{- else -}}
{{- base .Values.model.path | trimSuffix ".gguf" -}}
{{- end -}}
{{- end }}

{{/* Room to write, since the root file system is read-only. */}}
{{- define "baton.scratchMounts" -}}
- {name: home, mountPath: /home/baton}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "baton.scratchVolumes" -}}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "baton.modelMount" -}}
{{- if include "baton.hasModelVolume" . -}}
- {name: model, mountPath: {{ .Values.model.mountPath | quote }}, readOnly: {{ empty (include "baton.isOfHub" .) }}}
{{- end -}}
{{- end }}

{{- define "baton.hasModelVolume" -}}
{{- if or .Values.model.existingClaim .Values.model.persistentVolumeClaim.create .Values.model.download.files -}}yes{{- end -}}
{{- end }}

{{- define "baton.modelVolumes" -}}
{{- if include "baton.hasModelVolume" . -}}
- name: model
  {{- if or .Values.model.existingClaim .Values.model.persistentVolumeClaim.create }}
  persistentVolumeClaim:
    claimName: {{ include "baton.modelClaimName" . | quote }}
    readOnly: {{ and (empty .Values.model.download.files) (empty (include "baton.isOfHub" .)) }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- if .Values.model.download.files }}
- name: fetch
  configMap:
    name: {{ include "baton.fullname" . }}-fetch
{{- end }}
{{- end }}

{{/* Where downloads go: model.path, or the folder of the GGUF file that it is. */}}
{{- define "baton.downloadFolder" -}}
{{- hasSuffix ".gguf" .Values.model.path | ternary (dir .Values.model.path) .Values.model.path -}}
{{- end }}

{{/* (dict "root" $ "part" VALUES "skip" PATTERN): downloads the files of the model that are missing, and verifies all of them, except
for names that match `skip`. Without `part`, the container is for Ray's head. */}}
{{- define "baton.fetchContainer" -}}
{{- if .root.Values.model.download.files -}}
- name: fetch-model
  {{- include "baton.container" .root | nindent 2 }}
  command: [python3, /etc/baton/fetch/fetch_model.py, /etc/baton/fetch/files.json, {{ include "baton.downloadFolder" .root | quote }}{{ with .skip }}, --skip, {{ . | quote }}{{ end }}]
  {{- with (.part | default .root.Values.rayHead).extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- toYaml .root.Values.model.download.resources | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: {{ .root.Values.model.mountPath | quote }}}
    - {name: fetch, mountPath: /etc/baton/fetch, readOnly: true}
{{- end }}
{{- end }}

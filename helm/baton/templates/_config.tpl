{{/* Baton's configuration, from the values. */}}

{{/* The keys that the chart itself sets in the fleet's configuration file. */}}
{{- define "baton.fleetKeys" -}}
model:
  path: {{ .Values.model.path | quote }}
engine:
  device: {{ .Values.device }}
kv_transfer:
  lease_s: {{ .Values.drain.leaseSeconds }}
network:
  bind_host: {{ .Values.bindHost | quote }}
  metrics_port: {{ .Values.metrics.port }}
cluster:
  name: {{ include "baton.fullname" . | quote }}
  prefill: {{ .Values.prefill.replicas }}
  decode: {{ .Values.decode.replicas }}
  prefill_tensor_parallel: {{ .Values.prefill.tensorParallel }}
  decode_tensor_parallel: {{ .Values.decode.tensorParallel }}
  ray_address: auto
  # As long as the head's startup probe allows. If Ray has not started by then, the container ends, which Kubernetes shows.
  ray_timeout_s: 180
  fleet_port: {{ .Values.controller.port }}
  cpus_per_worker: 1
  prefill_resources: {prefill: 1}
  decode_resources: {decode: 1}
  start_timeout_s: {{ .Values.controller.startTimeoutSeconds }}
  drain_timeout_s: {{ .Values.drain.timeoutSeconds }}
  unresponsive_timeout_s: {{ .Values.drain.unresponsiveSeconds }}
{{- with .Values.autoscaling.workers }}
{{- if .enabled }}
autoscaling:
  mode: "on"
  min_prefill: {{ .minPrefill }}
  max_prefill: {{ .maxPrefill }}
  min_decode: {{ .minDecode }}
  max_decode: {{ .maxDecode }}
{{- end }}
{{- end }}
{{- end }}

{{/* The keys that the chart itself sets in a gateway's configuration file. */}}
{{- define "baton.gatewayKeys" -}}
model:
  path: {{ .Values.model.path | quote }}
gateway:
  host: {{ .Values.bindHost | quote }}
  grpc_port: 50051
  http_port: 8000
  api_keys_file: /etc/baton/keys.yaml
  {{- if (.Values.gateway.responseStore).existingSecret }}
  {{- if hasKey (.Values.config.gateway | default dict) "response_store" }}
  {{- fail "config.gateway.response_store and gateway.responseStore.existingSecret both name a store; remove one of the two keys" }}
  {{- end }}
  response_store_file: /etc/baton/response-store
  {{- end }}
  {{- if eq .Values.security.tls.mode "none" }}
  allow_plaintext: true
  {{- else }}
  tls:
    cert_file: /etc/baton/tls.crt
    key_file: /etc/baton/tls.key
  {{- end }}
cluster:
  name: {{ include "baton.fullname" . | quote }}
  fleet_address: {{ include "baton.fleetAddress" . }}
  start_timeout_s: {{ .Values.controller.startTimeoutSeconds }}
  drain_timeout_s: {{ .Values.drain.timeoutSeconds }}
{{- end }}

{{/* (dict "own" MAP "added" MAP "instead" MAP): `own` and `added`, merged section by section. A key that both have is an error, and
so is a key that is wrong in every pod. For such a key, `instead` names the value of the chart to set. */}}
{{- define "baton.merged" -}}
{{- $never := list "network.security" "network.advertise_host" "network.secret_file" "cluster.fleet_address" "gateway.allowed_hosts" "engine.tensor_parallel" -}}
{{- range $section, $keys := .added -}}
{{- range $key, $value := $keys -}}
{{- $name := printf "%s.%s" $section $key -}}
{{- if or (hasKey (index $.own $section | default dict) $key) (has $name $never) -}}
{{- $why := has $name $never | ternary "is wrong in the pods of the chart" "the chart sets this by itself" -}}
{{- $instead := index $.instead $name | default "" -}}
{{- fail (printf "config.%s: %s; %s" $name $why (empty $instead | ternary "remove it" (printf "set %s instead" $instead))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .own) .added) -}}
{{- end }}

{{/* For keys that the chart sets: the value of the chart that a user sets instead. */}}
{{- define "baton.instead" -}}
model.path: model.path
engine.device: device
engine.tensor_parallel: prefill.tensorParallel and decode.tensorParallel
kv_transfer.lease_s: drain.leaseSeconds
network.bind_host: bindHost
network.metrics_port: metrics.port
network.secret_file: security.clusterSecret.existingSecret
cluster.name: fullnameOverride
cluster.prefill: prefill.replicas
cluster.decode: decode.replicas
cluster.prefill_tensor_parallel: prefill.tensorParallel
cluster.decode_tensor_parallel: decode.tensorParallel
cluster.fleet_port: controller.port
cluster.start_timeout_s: controller.startTimeoutSeconds
cluster.drain_timeout_s: drain.timeoutSeconds
cluster.unresponsive_timeout_s: drain.unresponsiveSeconds
autoscaling.mode: autoscaling.workers.enabled
autoscaling.min_prefill: autoscaling.workers.minPrefill
autoscaling.max_prefill: autoscaling.workers.maxPrefill
autoscaling.min_decode: autoscaling.workers.minDecode
autoscaling.max_decode: autoscaling.workers.maxDecode
gateway.host: bindHost
gateway.grpc_port: gateway.grpcService.port
gateway.http_port: gateway.httpService.port
gateway.api_keys_file: security.apiKeys
gateway.response_store_file: gateway.responseStore.existingSecret
gateway.tls: security.tls
gateway.allow_plaintext: "security.tls.mode: none"
{{- end }}

{{/* The fleet's configuration file: all sections except `gateway`. Of this section, workers need only `max_in_flight`, for the
length of their queues. */}}
{{- define "baton.fleetConfig" -}}
{{- $own := include "baton.fleetKeys" . | fromYaml -}}
{{- $added := omit .Values.config "gateway" -}}
{{- with pick (.Values.config.gateway | default dict) "max_in_flight" -}}
{{- $added = set $added "gateway" . -}}
{{- end -}}
{{- with .Values.autoscaling.workers.config -}}
{{- range $key := keys ($added.autoscaling | default dict) -}}
{{- if hasKey $.Values.autoscaling.workers.config $key -}}
{{- fail (printf "config.autoscaling.%s: autoscaling.workers.config has the same key; remove one of the two" $key) -}}
{{- end -}}
{{- end -}}
{{- $added = merge (dict "autoscaling" .) $added -}}
{{- end -}}
{{- include "baton.merged" (dict "own" $own "added" $added "instead" (include "baton.instead" . | fromYaml)) -}}
{{- end }}

{{/* The part of this file whose change makes a new fleet: everything except the numbers of workers. */}}
{{- define "baton.fleetIdentity" -}}
{{- $config := include "baton.fleetConfig" . | fromYaml -}}
{{- toYaml (set $config "cluster" (omit $config.cluster "prefill" "decode")) -}}
{{- end }}

{{/* The namespace in Redis in which Ray's head stores the fleet. A new fleet has a new namespace. A new image makes a new fleet,
too. */}}
{{- define "baton.storeName" -}}
{{- $fleet := printf "%s %s" (include "baton.image" .) (include "baton.fleetIdentity" .) | sha256sum | trunc 16 -}}
{{- printf "%s.%s.%s" .Release.Namespace (include "baton.fullname" .) $fleet -}}
{{- end }}

{{/* A gateway's configuration file. The gateway gets everything else from the fleet. */}}
{{- define "baton.gatewayConfig" -}}
{{- $own := include "baton.gatewayKeys" . | fromYaml -}}
{{- $added := pick .Values.config "gateway" "logging" -}}
{{- include "baton.merged" (dict "own" $own "added" $added "instead" (include "baton.instead" . | fromYaml)) -}}
{{- end }}

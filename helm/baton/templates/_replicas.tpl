{{/* How many pods there are to be, where an autoscaler may have changed that by now. */}}

{{/* With autoscaling: as many gateways as there are. Kubernetes takes a number that was there and is left out for one: the
upgrade that turns autoscaling on would take away all gateways but one, and so would a later one that leaves out what the last one
said. At the first install, and where a chart is rendered without a cluster, there is none to keep. */}}
{{- define "baton.gatewayReplicas" -}}
{{- $scaling := .Values.autoscaling.gateway -}}
{{- if not $scaling.enabled -}}
{{- .Values.gateway.replicas -}}
{{- else -}}
{{- with lookup "apps/v1" "Deployment" .Release.Namespace (printf "%s-gateway" (include "baton.fullname" .)) -}}
{{- max (int $scaling.minReplicas) (min (int $scaling.maxReplicas) (int .spec.replicas)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* (dict "root" $ "role" ROLE): how many pods of a role there are at least, and at most. */}}
{{- define "baton.leastReplicas" -}}
{{- $scaling := .root.Values.autoscaling.workers -}}
{{- $scaling.enabled | ternary (index $scaling (printf "min%s" (title .role))) (index .root.Values .role).replicas -}}
{{- end }}

{{- define "baton.mostReplicas" -}}
{{- $scaling := .root.Values.autoscaling.workers -}}
{{- $scaling.enabled | ternary (index $scaling (printf "max%s" (title .role))) (index .root.Values .role).replicas -}}
{{- end }}

{{/* The same: how many there are to be. With autoscaling, as many as there are by now, since Ray's autoscaler, which has
changed that number, would be overruled. */}}
{{- define "baton.groupReplicas" -}}
{{- $replicas := (index .root.Values .role).replicas -}}
{{- if and .root.Values.autoscaling.workers.enabled (.root.Capabilities.APIVersions.Has "ray.io/v1") -}}
{{- $found := lookup "ray.io/v1" "RayCluster" .root.Release.Namespace (include "baton.fullname" .root) -}}
{{- range dig "spec" "workerGroupSpecs" list ($found | default dict) -}}
{{- if eq .groupName $.role -}}{{- $replicas = .replicas | default 0 -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- max (include "baton.leastReplicas" . | int) (min (include "baton.mostReplicas" . | int) (int $replicas)) -}}
{{- end }}

{{/* The numbers of pods. An autoscaler may have changed them since the last upgrade. */}}

{{/* The number of gateways; with autoscaling, the present number. It cannot be left out then: if an upgrade removes the number from a
Deployment, Kubernetes sets it to one. So the upgrade that turns autoscaling on would remove all gateways but one. At the first
install, and if the chart is rendered without a cluster, there is no present number, and the result is empty. */}}
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

{{/* (dict "root" $ "role" ROLE): the smallest number of pods of a role. `baton.mostReplicas` is the largest. */}}
{{- define "baton.leastReplicas" -}}
{{- $scaling := .root.Values.autoscaling.workers -}}
{{- $scaling.enabled | ternary (index $scaling (printf "min%s" (title .role))) (index .root.Values .role).replicas -}}
{{- end }}

{{- define "baton.mostReplicas" -}}
{{- $scaling := .root.Values.autoscaling.workers -}}
{{- $scaling.enabled | ternary (index $scaling (printf "max%s" (title .role))) (index .root.Values .role).replicas -}}
{{- end }}

{{/* (dict "root" $ "role" ROLE): the wanted number of pods of a role. With autoscaling, it is the present number: any other number
would overrule Ray's autoscaler. */}}
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

{{/* Names and labels. */}}

{{/* The first part of all names: at most 40 characters, so that a name has fewer than 63 even with the longest suffix. Ray requires
a letter at the beginning. A longer name is cut, and ends with a hash of the whole name. So two long names that begin alike stay
different. */}}
{{- define "baton.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = contains $chart .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $chart) -}}
{{- end -}}
{{- $name = replace "." "-" $name -}}
{{- if not (regexMatch "^[a-z]" $name) -}}{{- $name = printf "r%s" $name -}}{{- end -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" ($name | trunc 31 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* (dict "root" $ "component" "gateway"): the labels that select the pods of a component. They never change for a release. */}}
{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The labels of every object except pods: with these labels, each version of the chart would restart the pods. */}}
{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The value of the label `baton_release` of this release's metrics: several releases may share one Prometheus. */}}
{{- define "baton.metricsLabel" -}}
{{ .Release.Namespace }}/{{ .Release.Name }}
{{- end }}

{{/* (dict "root" $ "expr" PROMQL): the expression, restricted to this release's metrics. Each metric first gets braces of its own.
Then these are joined with braces that follow. */}}
{{- define "baton.ofRelease" -}}
{{- $own := printf "{baton_release=\"%s\"}" (include "baton.metricsLabel" .root) -}}
{{- regexReplaceAll "\\b(up|baton_[a-z0-9_]+)\\b" .expr (printf "${1}%s" $own) | replace "\"}{" "\", " -}}
{{- end }}

{{- define "baton.clusterSecretName" -}}
{{ .Values.security.clusterSecret.existingSecret | default (printf "%s-cluster" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.rayTokenName" -}}
{{ .Values.security.rayToken.existingSecret | default (printf "%s-ray-token" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.apiKeysName" -}}
{{ .Values.security.apiKeys.existingSecret | default (printf "%s-api-keys" (include "baton.fullname" .)) }}
{{- end }}

{{/* (dict "root" $ "owner" "metrics" or "test"): the name of the Secret with this key in plain text. Empty: there is no such key.
The chart makes a key only if it can give the key's hash to gateways. */}}
{{- define "baton.keyName" -}}
{{- $security := .root.Values.security -}}
{{- with (index $security (printf "%sKey" .owner)).existingSecret -}}
{{- . -}}
{{- else -}}
{{- if not $security.apiKeys.existingSecret -}}{{- printf "%s-%s-key" (include "baton.fullname" .root) .owner -}}{{- end -}}
{{- end -}}
{{- end }}

{{/* Whether Prometheus needs a key at gateways. */}}
{{- define "baton.metricsNeedKey" -}}
{{- if dig "metrics_need_key" true (.Values.config.gateway | default dict) -}}yes{{- end -}}
{{- end }}

{{- define "baton.tlsName" -}}
{{ .Values.security.tls.existingSecret | default (printf "%s-tls" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.modelClaimName" -}}
{{ .Values.model.existingClaim | default (printf "%s-model" (include "baton.fullname" .)) }}
{{- end }}

{{/* Where gateways and draining workers find the controller. */}}
{{- define "baton.fleetAddress" -}}
{{ include "baton.fullname" . }}-fleet:{{ .Values.controller.port }}
{{- end }}

{{- define "baton.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.device) }}
{{- end -}}
{{- end }}

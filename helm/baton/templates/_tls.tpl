{{/* Names under which clients reach gateways. */}}
{{- define "baton.doorNames" -}}
{{- $names := list "localhost" -}}
{{- range $kind := list "grpc" "http" -}}
{{- $service := printf "%s-%s" (include "baton.fullname" $) $kind -}}
{{- $names = concat $names (list $service (printf "%s.%s" $service $.Release.Namespace) (printf "%s.%s.svc" $service $.Release.Namespace) (printf "%s.%s.svc.cluster.local" $service $.Release.Namespace)) -}}
{{- end -}}
{{- concat $names .Values.security.tls.extraNames | toJson -}}
{{- end }}

{{/* A certificate by an authority whose key nobody keeps; `localhost` is for `kubectl port-forward`. */}}
{{- define "baton.generatedTls" -}}
{{- $secret := include "baton.tlsName" . -}}
{{- $days := int .Values.security.tls.validDays }}
apiVersion: v1
kind: Secret
type: kubernetes.io/tls
metadata:
  name: {{ $secret }}
  labels:
    {{- include "baton.labels" (dict "root" . "component" "security") | nindent 4 }}
data:
  {{- if include "baton.kept" (dict "root" . "name" $secret "key" "tls.crt") }}
  {{- range $key := list "ca.crt" "tls.crt" "tls.key" }}
  {{ $key }}: {{ include "baton.kept" (dict "root" $ "name" $secret "key" $key) }}
  {{- end }}
  {{- else }}
  {{- $authority := genCAWithKey (printf "authority of %s" (include "baton.fullname" .)) $days (genPrivateKey "ecdsa") }}
  {{- $pair := genSignedCertWithKey (printf "%s-http" (include "baton.fullname" .)) (list "127.0.0.1") (include "baton.doorNames" . | fromJsonArray) $days $authority (genPrivateKey "ecdsa") }}
  ca.crt: {{ $authority.Cert | b64enc }}
  tls.crt: {{ $pair.Cert | b64enc }}
  tls.key: {{ $pair.Key | b64enc }}
  {{- end }}
{{- end }}

{{/* The names and addresses by which clients reach gateways, as a JSON list. */}}
{{- define "baton.serviceNames" -}}
{{- $names := .Values.security.tls.internalNames | ternary (list "localhost") list -}}
{{- range $kind := .Values.security.tls.internalNames | ternary (list "grpc" "http") list -}}
{{- $service := printf "%s-%s" (include "baton.fullname" $) $kind -}}
{{- $names = concat $names (list $service (printf "%s.%s" $service $.Release.Namespace) (printf "%s.%s.svc" $service $.Release.Namespace) (printf "%s.%s.svc.cluster.local" $service $.Release.Namespace)) -}}
{{- end -}}
{{- concat $names (.Values.security.tls.extraNames | default list) | toJson -}}
{{- end }}

{{/* These names, divided into `dns` and `ip`: a certificate has a list of each kind. */}}
{{- define "baton.certificateNames" -}}
{{- $dns := list -}}{{- $ip := list -}}
{{- range include "baton.serviceNames" . | fromJsonArray -}}
{{- if regexMatch "^[0-9.]+$|:" . -}}{{- $ip = append $ip . -}}{{- else -}}{{- $dns = append $dns . -}}{{- end -}}
{{- end -}}
{{- dict "dns" $dns "ip" $ip | toJson -}}
{{- end }}

{{/* The name in the certificate that clients of the chart verify. Empty: the name of the Service, or `localhost`. */}}
{{- define "baton.serverName" -}}
{{- $tls := .Values.security.tls -}}
{{- $tls.serverName | default ($tls.internalNames | ternary "" (first ($tls.extraNames | default (list "")))) -}}
{{- end }}

{{/* Whether clients need the CA's certificate, which is then in the Secret. */}}
{{- define "baton.hasAuthority" -}}
{{- with .Values.security.tls -}}{{- if and .hasAuthority (ne .mode "none") -}}yes{{- end -}}{{- end -}}
{{- end }}

{{/* A hash of everything that decides the generated certificate. If it changes, the chart makes a new certificate. */}}
{{- define "baton.tlsRecipe" -}}
{{- $addresses := (include "baton.certificateNames" . | fromJson).ip | join " " -}}
{{- printf "%s%s %d" (include "baton.serviceNames" .) $addresses (int .Values.security.tls.validDays) | sha256sum -}}
{{- end }}

{{/* A certificate, signed by a CA whose key is not kept. The name `localhost` is for `kubectl port-forward`. */}}
{{- define "baton.generatedTls" -}}
{{- $secret := include "baton.tlsName" . -}}
{{- $days := int .Values.security.tls.validDays -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace $secret | default dict -}}
{{- $recipe := include "baton.tlsRecipe" . -}}
{{- $foundRecipe := dig "metadata" "annotations" "baton/certificate" "" $found -}}
{{- $isKept := and (ne (dig "data" "tls.crt" "" $found) "") (has $foundRecipe (list "" $recipe)) }}
apiVersion: v1
kind: Secret
type: kubernetes.io/tls
metadata:
  name: {{ $secret }}
  labels:
    {{- include "baton.labels" (dict "root" . "component" "security") | nindent 4 }}
  {{- with $isKept | ternary $foundRecipe $recipe }}
  annotations:
    baton/certificate: {{ . }}
  {{- end }}
data:
  {{- if $isKept }}
  {{- range $key := list "ca.crt" "tls.crt" "tls.key" }}
  {{ $key }}: {{ index $found.data $key }}
  {{- end }}
  {{- else }}
  {{- $authority := genCAWithKey (printf "authority of %s" (include "baton.fullname" .)) $days (genPrivateKey "ecdsa") }}
  {{- $names := include "baton.certificateNames" . | fromJson }}
  {{- $pair := genSignedCertWithKey (printf "%s-http" (include "baton.fullname" .)) (prepend $names.ip "127.0.0.1") $names.dns $days $authority (genPrivateKey "ecdsa") }}
  ca.crt: {{ $authority.Cert | b64enc }}
  tls.crt: {{ $pair.Cert | b64enc }}
  tls.key: {{ $pair.Key | b64enc }}
  {{- end }}
{{- end }}

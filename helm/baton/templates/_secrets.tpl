{{/* Secrets that the chart makes once. `lookup` finds the Secret of an earlier install, whose content is kept. With `helm template`
and in a client-side dry run it finds nothing, so each rendering makes new Secrets: use existing Secrets there. */}}

{{/* (dict "root" $ "name" SECRET "key" KEY): the value of the key in the Secret, in base64. Empty: there is no such Secret or key. */}}
{{- define "baton.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- index ($found.data | default dict) .key | default "" -}}
{{- end }}

{{/* This value or, if it is empty, 43 random letters and digits, which are 256 bits. */}}
{{- define "baton.keptOrRandom" -}}
{{- include "baton.kept" . | default (randAlphaNum 43 | b64enc) -}}
{{- end }}

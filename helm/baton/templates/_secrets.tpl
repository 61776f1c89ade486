{{/* Secrets that the chart makes once. `lookup` finds what an earlier install made, and that is kept; under `helm template`
and a client-side dry run there is nothing to find, so each rendering makes new ones: give existing Secrets there. */}}

{{/* (dict "root" $ "name" SECRET "key" KEY): what the Secret holds there, in base64; empty if there is none. */}}
{{- define "baton.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- index ($found.data | default dict) .key | default "" -}}
{{- end }}

{{/* The same, or 43 random letters and digits, which are 256 bits. */}}
{{- define "baton.keptOrRandom" -}}
{{- include "baton.kept" . | default (randAlphaNum 43 | b64enc) -}}
{{- end }}

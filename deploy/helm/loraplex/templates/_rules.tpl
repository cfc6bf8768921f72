{{/* A file of rules, fit for this release: addresses for workers that may come are not missed, and where there may be
none, none is no alert. Other releases' workers are their own rules' matter. dict: root, path */}}
{{- define "loraplex.rules" -}}
{{- $most := 0 -}}
{{- $fewest := 0 -}}
{{- range $given := .root.Values.pools -}}
{{- $scope := dict "pool" (include "loraplex.pool" (dict "root" $.root "pool" $given) | fromYaml) -}}
{{- $most = add $most (include "loraplex.pool.most" $scope) -}}
{{- $fewest = add $fewest (include "loraplex.pool.fewest" $scope) -}}
{{- end -}}
{{- $own := printf "namespace=%q,service=~\"%s|\"" .root.Release.Namespace (include "loraplex.router.name" .root) -}}
{{- $text := .root.Files.Get .path -}}
{{- $text = replace "(loraplex_workers_ready) == 0" (printf "(loraplex_workers_ready{%s}) == 0" $own) $text -}}
{{- $text = replace "{state=\"disconnected\"}) > 0" (printf "{%s,state=\"disconnected\"}) > %d" $own (sub $most $fewest)) $text -}}
{{- with .root.Values.monitoring.prometheusRule.runbooks -}}
{{- $text = replace "docs/operations/runbooks/" (printf "%s/" (trimSuffix "/" .)) $text -}}
{{- end -}}
{{- $file := fromYaml $text -}}
{{- range $group := $file.groups -}}
{{- $rules := list -}}
{{- range $group.rules -}}
{{- if or $fewest (ne (default "" .alert) "LoraplexNoReadyWorker") -}}{{- $rules = append $rules . -}}{{- end -}}
{{- end -}}
{{- $_ := set $group "rules" $rules -}}
{{- end -}}
{{- toYaml $file -}}
{{- end -}}

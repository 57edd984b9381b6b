{{/* Name of the release's objects; Ray's services add to it, and a name may have 63 characters. */}}
{{- define "packhouse.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "packhouse.labels" -}}
app.kubernetes.io/name: packhouse
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "packhouse.serviceSelector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: service
{{- end -}}

{{- define "packhouse.raySelector" -}}
ray.io/cluster: {{ include "packhouse.name" . }}
{{- end -}}

{{- define "packhouse.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "packhouse.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What every pod that touches the store or the sources mounts. */}}
{{- define "packhouse.volumes" -}}
{{- if .Values.store.credentialsSecret }}
- name: store-credentials
  secret: {secretName: {{ .Values.store.credentialsSecret }}}
{{- end }}
{{- with .Values.store.volume }}
- name: store
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.sources.volume }}
- name: sources
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "packhouse.mounts" -}}
{{- if .Values.store.credentialsSecret }}
- {name: store-credentials, mountPath: /run/secrets/store, readOnly: true}
{{- end }}
{{- if .Values.store.volume }}
- {name: store, mountPath: {{ .Values.store.mountPath }}}
{{- end }}
{{- if .Values.sources.volume }}
- {name: sources, mountPath: {{ .Values.sources.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "packhouse.storeEnvironment" -}}
{{- if .Values.store.credentialsSecret }}
- {name: AWS_SHARED_CREDENTIALS_FILE, value: /run/secrets/store/credentials}
{{- end }}
{{- end -}}

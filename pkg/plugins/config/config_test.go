// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2/ktesting"
	configv1 "k8s.io/kube-scheduler/config/v1"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
)

// args loads a configuration whose only profile enables DeviceClaims with the given pluginConfig, through
// kube-scheduler's own loader, and returns the plugin's arguments.
func args(t *testing.T, pluginConfig string) (runtime.Object, error) {
	t.Helper()
	logger, _ := ktesting.NewTestContext(t)
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: stowage
  plugins:
    multiPoint:
      enabled:
      - name: DeviceClaims
` + pluginConfig
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := options.LoadConfigFromFile(logger, file)
	if err != nil {
		return nil, err
	}
	for _, pc := range cfg.Profiles[0].PluginConfig {
		if pc.Name == "DeviceClaims" {
			return pc.Args, nil
		}
	}
	t.Fatal("the loader gave the profile no arguments for DeviceClaims")
	return nil, nil
}

func TestArgsFromFile(t *testing.T) {
	seconds := func(n time.Duration) *metav1.Duration { return &metav1.Duration{Duration: n * time.Second} }
	fence := &config.FenceArgs{Enabled: ptr.To(true), Timeout: seconds(30), Jitter: seconds(1)}
	unowned := &config.OwnershipArgs{Enabled: ptr.To(false), Driver: "gpu.nvidia.com"}
	strategy := &config.ScoringStrategy{Type: config.MostAllocated, Devices: config.SmallestFit}
	tests := map[string]struct {
		pluginConfig string
		want         *config.DeviceClaimsArgs
		wantErr      []string
	}{
		"no pluginConfig entry gives the defaults": {
			want: &config.DeviceClaimsArgs{FilterTimeout: seconds(10), BindingTimeout: seconds(600), AuditPeriod: seconds(600), Fence: fence, Ownership: unowned, ScoringStrategy: strategy, ClaimsOfOtherNamespaces: config.CountClaims},
		},
		"a field that is not set gets its default, one that is set keeps its value": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      filterTimeout: 3s
`,
			want: &config.DeviceClaimsArgs{FilterTimeout: seconds(3), BindingTimeout: seconds(600), AuditPeriod: seconds(600), Fence: fence, Ownership: unowned, ScoringStrategy: strategy, ClaimsOfOtherNamespaces: config.CountClaims},
		},
		"the fence can be disabled alone": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      fence:
        enabled: false
        jitter: 0s
`,
			want: &config.DeviceClaimsArgs{
				FilterTimeout: seconds(10), BindingTimeout: seconds(600), AuditPeriod: seconds(600),
				Fence:     &config.FenceArgs{Enabled: ptr.To(false), Timeout: seconds(30), Jitter: seconds(0)},
				Ownership: unowned, ScoringStrategy: strategy, ClaimsOfOtherNamespaces: config.CountClaims,
			},
		},
		"devices are owned by driver, pool and name": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      ownership: {enabled: true, driver: gpu.example.com, pool: rack/1, device: gpu-0}
`,
			want: &config.DeviceClaimsArgs{
				FilterTimeout: seconds(10), BindingTimeout: seconds(600), AuditPeriod: seconds(600),
				Fence:     fence,
				Ownership: &config.OwnershipArgs{Enabled: ptr.To(true), Driver: "gpu.example.com", Pool: "rack/1", Device: "gpu-0"}, ScoringStrategy: strategy, ClaimsOfOtherNamespaces: config.CountClaims,
			},
		},
		"kind and apiVersion may be given": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      apiVersion: kubescheduler.config.k8s.io/v1
      kind: DeviceClaimsArgs
      filterTimeout: 0s
      bindingTimeout: 30s
      auditPeriod: 0s
`,
			want: &config.DeviceClaimsArgs{FilterTimeout: seconds(0), BindingTimeout: seconds(30), AuditPeriod: seconds(0), Fence: fence, Ownership: unowned, ScoringStrategy: strategy, ClaimsOfOtherNamespaces: config.CountClaims},
		},
		"half of a scoring strategy": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      scoringStrategy:
        type: LeastAllocated
`,
			want: &config.DeviceClaimsArgs{
				FilterTimeout: seconds(10), BindingTimeout: seconds(600), AuditPeriod: seconds(600), Fence: fence, Ownership: unowned,
				ScoringStrategy: &config.ScoringStrategy{Type: config.LeastAllocated, Devices: config.SmallestFit}, ClaimsOfOtherNamespaces: config.CountClaims,
			},
		},
		"an unknown field is refused by name": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      filterTimout: 3s
`,
			wantErr: []string{"DeviceClaims", `unknown field "filterTimout"`},
		},
		"an unknown field of the fence is refused by its path": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      fence:
        enable: false
`,
			wantErr: []string{"DeviceClaims", `unknown field "fence.enable"`},
		},
		"a value of the wrong type is refused": {
			pluginConfig: `
  pluginConfig:
  - name: DeviceClaims
    args:
      filterTimeout: soon
`,
			wantErr: []string{"DeviceClaims", `soon`},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := args(t, tc.pluginConfig)
			if err != nil || tc.wantErr != nil {
				if err == nil {
					t.Fatalf("loaded %+v, want an error with %q", got, tc.wantErr)
				}
				for _, want := range tc.wantErr {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error %q does not contain %q", err, want)
					}
				}
				return
			}
			gotArgs, ok := got.(*config.DeviceClaimsArgs)
			if !ok {
				t.Fatalf("loaded args of type %T", got)
			}
			gotArgs.TypeMeta = metav1.TypeMeta{}
			if diff := cmp.Diff(tc.want, gotArgs); diff != "" {
				t.Errorf("args differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestArgsAreWrittenInTheirVersion(t *testing.T) {
	loaded, err := args(t, "")
	if err != nil {
		t.Fatal(err)
	}
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeYAML)
	out, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, configv1.SchemeGroupVersion), loaded)
	if err != nil {
		t.Fatal(err)
	}
	want := `apiVersion: kubescheduler.config.k8s.io/v1
auditPeriod: 10m0s
bindingTimeout: 10m0s
claimsOfOtherNamespaces: Count
fence:
  enabled: true
  jitter: 1s
  timeout: 30s
filterTimeout: 10s
kind: DeviceClaimsArgs
ownership:
  driver: gpu.nvidia.com
  enabled: false
scoringStrategy:
  devices: SmallestFit
  type: MostAllocated
`
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Errorf("encoded args differ (-want +got):\n%s", diff)
	}
}

func TestArgsCopyIsIndependent(t *testing.T) {
	original := &config.DeviceClaimsArgs{}
	config.SetDefaultsDeviceClaimsArgs(original)
	copied := original.DeepCopyObject().(*config.DeviceClaimsArgs)
	copied.FilterTimeout.Duration = 1
	copied.BindingTimeout.Duration = 1
	copied.Fence.Timeout.Duration = 1
	copied.Fence.Jitter.Duration = 1
	*copied.Fence.Enabled = false
	copied.ScoringStrategy.Type = ""
	copied.AuditPeriod.Duration = 1
	*copied.Ownership.Enabled = true
	copied.Ownership.Driver = "gpu.example.com"
	want := &config.DeviceClaimsArgs{}
	config.SetDefaultsDeviceClaimsArgs(want)
	if diff := cmp.Diff(want, original); diff != "" {
		t.Errorf("changing the copy changed the original (-want +got):\n%s", diff)
	}
}

func TestValidateDeviceClaimsArgs(t *testing.T) {
	tests := map[string]struct {
		change  func(*config.DeviceClaimsArgs)
		wantErr string
	}{
		"the defaults are valid": {change: func(*config.DeviceClaimsArgs) {}},
		"no bound for the search is valid": {
			change: func(a *config.DeviceClaimsArgs) { a.FilterTimeout.Duration = 0 },
		},
		"a negative filterTimeout is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.FilterTimeout.Duration = -time.Second },
			wantErr: `filterTimeout: Invalid value: "-1s": must be at least 0s`,
		},
		"a bindingTimeout below a second is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.BindingTimeout.Duration = time.Millisecond },
			wantErr: `bindingTimeout: Invalid value: "1ms": must be at least 1s`,
		},
		"no comparison with the API is valid": {
			change: func(a *config.DeviceClaimsArgs) { a.AuditPeriod.Duration = 0 },
		},
		"an auditPeriod below a second is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.AuditPeriod.Duration = time.Millisecond },
			wantErr: `auditPeriod: Invalid value: "1ms": must be at least 1s`,
		},
		"an unknown type of scoring is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.ScoringStrategy.Type = "Random" },
			wantErr: `scoringStrategy.type: Unsupported value: "Random": supported values: "LeastAllocated", "MostAllocated"`,
		},
		"names of other namespaces' claims are valid": {
			change: func(a *config.DeviceClaimsArgs) { a.ClaimsOfOtherNamespaces = config.NameClaims },
		},
		"an unknown way to tell of other namespaces' claims is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.ClaimsOfOtherNamespaces = "Hide" },
			wantErr: `claimsOfOtherNamespaces: Unsupported value: "Hide": supported values: "Count", "Name"`,
		},
		"an unknown order of devices is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.ScoringStrategy.Devices = "Biggest" },
			wantErr: `scoringStrategy.devices: Unsupported value: "Biggest": supported values: "FirstFit", "SmallestFit"`,
		},
		"arguments without defaults are refused": {
			change:  func(a *config.DeviceClaimsArgs) { *a = config.DeviceClaimsArgs{} },
			wantErr: `[filterTimeout: Required value, bindingTimeout: Required value, fence: Required value, auditPeriod: Required value, ownership: Required value, scoringStrategy: Required value, claimsOfOtherNamespaces: Required value]`,
		},
		"a fence without defaults is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.Fence = &config.FenceArgs{} },
			wantErr: `[fence.enabled: Required value, fence.timeout: Required value, fence.jitter: Required value]`,
		},
		"a fence that waits for less than a second is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.Fence.Timeout.Duration = 999 * time.Millisecond },
			wantErr: `fence.timeout: Invalid value: "999ms": must be at least 1s`,
		},
		"a negative jitter is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.Fence.Jitter.Duration = -1 },
			wantErr: `fence.jitter: Invalid value: "-1ns": must be at least 0s`,
		},
		"ownership without defaults is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.Ownership.Enabled = nil },
			wantErr: `ownership.enabled: Required value`,
		},
		"an owned driver that no slice can have is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.Ownership.Driver = "GPU" },
			wantErr: `ownership.driver: Invalid value: "GPU": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')`,
		},
		"an owned pool that no slice can have is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.Ownership.Pool = "rack/" },
			wantErr: `ownership.pool: Invalid value: "rack/": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')`,
		},
		"an owned device that no slice can have is refused": {
			change:  func(a *config.DeviceClaimsArgs) { a.Ownership.Device = "gpu.0" },
			wantErr: `ownership.device: Invalid value: "gpu.0": must not contain dots`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			a := &config.DeviceClaimsArgs{}
			config.SetDefaultsDeviceClaimsArgs(a)
			tc.change(a)
			got := ""
			if err := config.ValidateDeviceClaimsArgs(a); err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff(tc.wantErr, got); diff != "" {
				t.Errorf("error differs (-want +got):\n%s", diff)
			}
		})
	}
}

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"stowage.dev/stowage/internal/localcluster"
)

// What a configuration consists of in these tests: profiles with ours in the right place, or not.
const (
	configHead = `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
`
	goodProfile = `- schedulerName: config-test
  plugins:
    multiPoint: {disabled: [{name: DynamicResources}], enabled: [{name: DeviceClaims}]}
    postFilter: {enabled: [{name: DeviceClaims}]}
    podGroupPostFilter: {enabled: [{name: DeviceClaims}]}
    preBind: {enabled: [{name: DeviceClaims}]}
`
	numaProfile = `- schedulerName: config-test
  plugins:
    multiPoint: {disabled: [{name: DynamicResources}], enabled: [{name: DeviceClaims}, {name: NodeResourceTopologyMatch}]}
    postFilter: {enabled: [{name: DeviceClaims}]}
    preBind: {enabled: [{name: DeviceClaims}]}
`
)

// A process that cannot do its work right says what to change, and ends.
func TestSchedulerRefusesToStart(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(t.TempDir(), "missing.kubeconfig")
	tests := map[string]struct {
		config     string
		kubeconfig string
		message    []string
	}{
		"with the in-tree plugin in the same profile": {
			config: configHead + `- schedulerName: config-test
  plugins:
    multiPoint: {enabled: [{name: DeviceClaims}]}
    postFilter: {enabled: [{name: DeviceClaims}]}
    preBind: {enabled: [{name: DeviceClaims}]}
`,
			message: []string{"profile: config-test", "disable DynamicResources"},
		},
		"with the in-tree plugin in another profile": {
			config:  configHead + goodProfile + "- schedulerName: other\n",
			message: []string{"profile: other", "DynamicResources", "use DeviceClaims in all profiles"},
		},
		"with our PostFilter after the defaults": {
			config: configHead + `- schedulerName: config-test
  plugins:
    multiPoint: {disabled: [{name: DynamicResources}], enabled: [{name: DeviceClaims}]}
    preBind: {enabled: [{name: DeviceClaims}]}
`,
			message: []string{"config-test", "postFilter", "DeviceClaims", "DefaultPreemption"},
		},
		"with our PreBind after the defaults": {
			config: configHead + `- schedulerName: config-test
  plugins:
    multiPoint: {disabled: [{name: DynamicResources}], enabled: [{name: DeviceClaims}]}
    postFilter: {enabled: [{name: DeviceClaims}]}
`,
			message: []string{"config-test", "preBind", "DeviceClaims", "VolumeBinding"},
		},
		"with an unknown argument": {
			config: configHead + goodProfile + `  pluginConfig:
  - name: DeviceClaims
    args: {apiVersion: kubescheduler.config.k8s.io/v1, kind: DeviceClaimsArgs, filterTimeuot: 1s}
`,
			message: []string{"DeviceClaims", "unknown field", "filterTimeuot"},
		},
		"with a bad value": {
			config: configHead + goodProfile + `  pluginConfig:
  - name: DeviceClaims
    args: {apiVersion: kubescheduler.config.k8s.io/v1, kind: DeviceClaimsArgs, filterTimeout: -1s}
`,
			message: []string{"filterTimeout", "-1s"},
		},
		"with an unknown argument for NUMA nodes": {
			config: configHead + numaProfile + `  pluginConfig:
  - name: NodeResourceTopologyMatch
    args: {apiVersion: kubescheduler.config.k8s.io/v1, kind: NodeResourceTopologyMatchArgs, scoringStrategie: {type: LeastAllocated}}
`,
			message: []string{"NodeResourceTopologyMatch", "unknown field", "scoringStrategie"},
		},
		"with a bad value for NUMA nodes": {
			config: configHead + numaProfile + `  pluginConfig:
  - name: NodeResourceTopologyMatch
    args: {apiVersion: kubescheduler.config.k8s.io/v1, kind: NodeResourceTopologyMatchArgs, scoringStrategy: {type: Fewest}}
`,
			message: []string{"NodeResourceTopologyMatch", "scoringStrategy.type", "Fewest"},
		},
		"without its kubeconfig": {
			config:     configHead + goodProfile,
			kubeconfig: missing,
			message:    []string{missing},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := tryProcess(t.Context(), localcluster.SchedulerOptions{
				Name:       "refused",
				Config:     writeConfig(t, test.config),
				Kubeconfig: test.kubeconfig,
			})
			var exit *localcluster.ExitError
			if !errors.As(err, &exit) || exit.Err == nil {
				t.Fatalf("starting the scheduler: %v, want it to exit with an error", err)
			}
			log, err := os.ReadFile(exit.LogFile)
			if err != nil {
				t.Fatal(err)
			}
			if !hasAll(string(log), test.message) {
				t.Errorf("the process says\n%s\nwant it to name %q", log, test.message)
			}
			if strings.Contains(string(log), "panic") {
				t.Errorf("the process panics:\n%s", log)
			}
		})
	}
}

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

func TestSchedulerConfigKeepsAllButTheConnection(t *testing.T) {
	const file = `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {qps: 100}
leaderElection: {leaderElect: true, resourceName: stowage}
profiles: [{schedulerName: stowage}]
unknownField: 1
`
	tests := map[string]struct {
		leaderElect bool
		file        string
		want        map[string]any
		wantErr     string
	}{
		"without leader election": {
			file: file,
			want: map[string]any{
				"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
				"clientConnection": map[string]any{"qps": 100.0, "kubeconfig": "/k"},
				"leaderElection":   map[string]any{"leaderElect": false, "resourceName": "stowage"},
				"profiles":         []any{map[string]any{"schedulerName": "stowage"}},
				"unknownField":     1.0,
			},
		},
		"with leader election": {
			file: "leaderElection: {leaderElect: true}", leaderElect: true,
			want: map[string]any{
				"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
				"clientConnection": map[string]any{"kubeconfig": "/k"},
				"leaderElection":   map[string]any{"leaderElect": true},
			},
		},
		"no object where one belongs": {file: "clientConnection: 3", wantErr: "clientConnection is a float64, not an object"},
		"no YAML":                     {file: "}", wantErr: "config.yaml"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(path, []byte(test.file), 0o600); err != nil {
				t.Fatal(err)
			}
			data, err := schedulerConfig(SchedulerOptions{Config: path, Kubeconfig: "/k", LeaderElect: test.leaderElect})
			if test.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), test.wantErr) {
					t.Errorf("got error %v, want one with %q", err, test.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got map[string]any
			if err := yaml.Unmarshal(data, &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("configuration (-want +got):\n%s", diff)
			}
		})
	}
}

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
)

func TestCheckKubeconfig(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	good := write("good", "apiVersion: v1\nkind: Config\n")
	garbage := write("garbage", "{")
	config := func(name, kubeconfig string) string {
		return write(name, "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nclientConnection:\n  kubeconfig: "+kubeconfig+"\n")
	}
	missing := filepath.Join(dir, "missing")

	tests := map[string]struct {
		args []string
		want []string
	}{
		"none is needed in a pod":                      {},
		"a readable one is accepted":                   {args: []string{"--kubeconfig", good}},
		"a readable one in the configuration is used":  {args: []string{"--config", config("a.yaml", good)}},
		"a missing one is named":                       {args: []string{"--kubeconfig", missing}, want: []string{"--kubeconfig", missing, "no such file"}},
		"one that makes no sense is named":             {args: []string{"--kubeconfig", garbage}, want: []string{"--kubeconfig", garbage}},
		"a missing one in the configuration is named":  {args: []string{"--config", config("b.yaml", missing)}, want: []string{"b.yaml", "clientConnection.kubeconfig", missing, "no such file"}},
		"a missing configuration is named":             {args: []string{"--config", missing}, want: []string{"--config", missing, "no such file"}},
		"a configuration with an unknown arg is named": {args: []string{"--config", write("c.yaml", unknownArg)}, want: []string{"c.yaml", `unknown field "filterTimout"`}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			opts := options.NewOptions()
			flags := opts.Flags.FlagSet("misc")
			flags.AddFlagSet(opts.Flags.FlagSet("deprecated"))
			if err := flags.Parse(tc.args); err != nil {
				t.Fatal(err)
			}
			err := checkKubeconfig(opts)
			if (err == nil) != (len(tc.want) == 0) {
				t.Fatalf("error: %v", err)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not contain %q", err, want)
				}
			}
		})
	}
}

const unknownArg = `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: stowage
  pluginConfig:
  - name: DeviceClaims
    args: {filterTimout: 1s}
`

// The whole of kube-scheduler's command line is there.
func TestCommandHasKubeSchedulersFlags(t *testing.T) {
	cmd := newCommand()
	for _, name := range []string{"config", "kubeconfig", "leader-elect", "secure-port", "feature-gates", "v", "logging-format", "version", "write-config-to", "authentication-kubeconfig"} {
		if cmd.Flags().Lookup(name) == nil {
			t.Errorf("no flag --%s", name)
		}
	}
}

// No allow-list of metric labels is no error.
func TestMetricsFlagsAreAppliedWithoutAnError(t *testing.T) {
	for name, args := range map[string][]string{
		"no flags":          nil,
		"a disabled metric": {"--disabled-metrics=stowage_of_a_test"},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			state := klog.CaptureState()
			defer state.Restore()
			klog.LogToStderr(false)
			klog.SetOutput(&log)
			opts := options.NewOptions()
			if err := opts.Flags.FlagSet("metrics").Parse(args); err != nil {
				t.Fatal(err)
			}
			if err := applyMetrics(opts); err != nil {
				t.Fatal(err)
			}
			if errs := opts.Metrics.Validate(); len(errs) > 0 { // as Setup does
				t.Error(errs)
			}
			opts.Metrics.Apply()
			klog.Flush()
			if log.Len() > 0 {
				t.Errorf("logged %s", log.String())
			}
		})
	}
	opts := options.NewOptions()
	if err := opts.Flags.FlagSet("metrics").Parse([]string{"--allow-metric-labels=a,b=c"}); err != nil {
		t.Fatal(err)
	}
	if err := applyMetrics(opts); err != nil || opts.Metrics == nil {
		t.Errorf("an allow-list is lost: %v", err)
	}
}

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"

	"stowage.dev/stowage/pkg/plugins/config"
)

const configHead = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"

// goodPlugins are the plugins of a profile without a finding.
const goodPlugins = `
  plugins:
    multiPoint: {enabled: [{name: DeviceClaims}], disabled: [{name: DynamicResources}]}
    filter: {enabled: [{name: NodeUnschedulable}, {name: NodeName}, {name: TaintToleration}, {name: NodeAffinity}, {name: DeviceClaims}]}
    postFilter: {enabled: [{name: DeviceClaims}]}
    preBind: {enabled: [{name: DeviceClaims}]}
`

// validated runs --validate-config, and returns what it prints with the file's name as FILE.
func validated(t *testing.T, text string) (string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err := validateConfig(t.Context(), &out, options.NewOptions(), file)
	got := strings.ReplaceAll(out.String(), file, "FILE")
	if err != nil {
		got += strings.ReplaceAll(err.Error(), file, "FILE")
	}
	return got, err
}

// A key is its own in one spelling alone.
func TestAKeyInAnotherSpellingIsNamed(t *testing.T) {
	const args = "  - name: DeviceClaims\n    args: {bindingTimeout: true}\n"
	for key, text := range map[string]string{
		"profiles[0].pluginconfig": "profiles:\n- schedulerName: stowage\n  pluginconfig:\n" + args,
		"Profiles":                 "Profiles:\n- schedulerName: stowage\n  pluginConfig:\n" + args,
	} {
		if got, err := validated(t, configHead+text); err == nil || !strings.Contains(got, fmt.Sprintf("unknown field %q", key)) {
			t.Errorf("%s: %q, %v", key, got, err)
		}
	}
}

func TestValidateConfigSaysAllThatIsWrong(t *testing.T) {
	const advice = "correct this profile; the order of its plugins is checked once it can be made"
	tests := map[string]struct {
		text   string
		want   string
		passes bool
	}{
		"a good one passes": {
			text: configHead + "profiles:\n- schedulerName: stowage" + goodPlugins, passes: true,
			want: "FILE: nothing refused, 0 warnings. Not looked at: the cluster, and files that it names\n",
		},
		"no order in filter is a warning, and passes": {
			text: configHead + "profiles:\n- schedulerName: stowage" + strings.Replace(goodPlugins, "    filter:", "    permit: {} #", 1), passes: true,
			want: `warning: in filter, DeviceClaims comes after NodeResourcesFit: preemption tries nodes whose devices no eviction frees
  profile: stowage
  plugin:  DeviceClaims
  field:   plugins.filter.enabled
  value:   NodeName, NodeUnschedulable, TaintToleration, NodeAffinity, NodePorts, NodeResourcesFit, VolumeRestrictions, ` +
				`NodeVolumeLimits, VolumeBinding, VolumeZone, PodTopologySpread, InterPodAffinity, NodeDeclaredFeatures, DeviceClaims
  change:  list in filter: NodeUnschedulable, NodeName, TaintToleration, NodeAffinity, DeviceClaims

FILE: nothing refused, 1 warning. Not looked at: the cluster, and files that it names
`,
		},
		"DeviceClaims alone in filter is a warning, too": {
			text: configHead + "profiles:\n- schedulerName: stowage" +
				strings.Replace(goodPlugins, "{name: NodeUnschedulable}, {name: NodeName}, {name: TaintToleration}, {name: NodeAffinity}, ", "", 1),
			passes: true,
			want: `warning: in filter, DeviceClaims comes before NodeUnschedulable, NodeName, TaintToleration, NodeAffinity: preemption tries nodes that the pod cannot use
  profile: stowage
  plugin:  DeviceClaims
  field:   plugins.filter.enabled
  value:   DeviceClaims, NodeName, NodeUnschedulable, TaintToleration, NodeAffinity, NodePorts, NodeResourcesFit, VolumeRestrictions, ` +
				`NodeVolumeLimits, VolumeBinding, VolumeZone, PodTopologySpread, InterPodAffinity, NodeDeclaredFeatures
  change:  list in filter: NodeUnschedulable, NodeName, TaintToleration, NodeAffinity, DeviceClaims

FILE: nothing refused, 1 warning. Not looked at: the cluster, and files that it names
`,
		},
		"findings of all kinds and profiles come together": {
			text: configHead + `parallelism: -1
profiles:
- schedulerName: stowage` + strings.Replace(goodPlugins, "    postFilter:", "    permit: {} #", 1) + `
  pluginConfig:
  - name: DeviceClaims
    args: {bindingTimeout: 10, fence: {enabled: "yes", timeout: 1ms}}
- schedulerName: other
  plugins: {multiPoint: {enabled: [{name: DeviceClaim}]}}
`,
			want: `refused: bindingTimeout takes a value of type duration, not 10
  profile: stowage
  plugin:  DeviceClaims
  field:   profiles[0].pluginConfig[0].args.bindingTimeout
  value:   10
  change:  write a number with a unit in quotes, such as "300ms", "10s" or "10m"; the default is 10m

refused: fence.enabled takes a value of type boolean, not "yes"
  profile: stowage
  plugin:  DeviceClaims
  field:   profiles[0].pluginConfig[0].args.fence.enabled
  value:   "yes"
  change:  write true or false, without quotes; the default is true

refused: Invalid value: -1: should be an integer value greater than zero
  field:   parallelism
  value:   -1
  change:  correct it, or remove it for its default

refused: Invalid value: "1ms": must be at least 1s
  profile: stowage
  plugin:  DeviceClaims
  field:   profiles[0].pluginConfig[0].args.fence.timeout
  value:   1ms
  change:  correct fence.timeout, or remove it for its default, 30s

refused: PreFilterPlugin "DeviceClaim" does not exist
  profile: other
  change:  ` + advice + `

refused: in postFilter, DeviceClaims comes after DefaultPreemption
  profile: stowage
  plugin:  DeviceClaims
  field:   plugins.postFilter.enabled
  value:   DefaultPreemption, DeviceClaims
  change:  enable DeviceClaims in postFilter explicitly, before it

FILE: 6 refused, 0 warnings: the scheduler does not start with it`,
		},
		"a field that kube-scheduler does not know": {
			text: configHead + "profils: []\nparallel: 3\n",
			want: "refused: unknown field \"parallel\"\n  change:  correct it, or remove it for its default\n\n" +
				"refused: unknown field \"profils\"\n  change:  correct it, or remove it for its default\n\n" +
				"FILE: 2 refused, 0 warnings: the scheduler does not start with it",
		},
		"no YAML": {
			text: "this: [is not\n  yaml: at all\n",
			want: "refused: the file is no YAML object: yaml: line 1: did not find expected ',' or ']'\n  change:  " + changeKind + "\n\n" +
				"FILE: 1 refused, 0 warnings: the scheduler does not start with it",
		},
		"an empty file": {
			text: "",
			want: "refused: the file is empty\n  change:  " + changeKind + "\n\nFILE: 1 refused, 0 warnings: the scheduler does not start with it",
		},
		"two documents": {
			text: "---\n" + configHead + "---\n" + configHead + "parallelism: -1\n---\n# nothing\n", passes: true,
			want: "warning: the file has 2 documents, and only the first is read\n  change:  put all profiles into one document, and remove the others\n\n" +
				"FILE: nothing refused, 1 warning. Not looked at: the cluster, and files that it names\n",
		},
		"another kind of object": {
			text: "apiVersion: v1\nkind: Pod\n",
			want: "refused: the file is no KubeSchedulerConfiguration: no kind \"Pod\" is registered for version \"v1\"\n" +
				"  change:  begin it with apiVersion: kubescheduler.config.k8s.io/v1 and kind: KubeSchedulerConfiguration\n\nFILE: 1 refused, 0 warnings: the scheduler does not start with it",
		},
		"two profiles of one name": {
			text: configHead + "profiles:\n- schedulerName: stowage" + goodPlugins + "- schedulerName: stowage" + goodPlugins,
			want: "refused: profiles[1].schedulerName has the same value as profiles[0].schedulerName\n  profile: stowage\n" +
				"  field:   profiles[1].schedulerName\n  change:  correct it, or remove it for its default\n\n" +
				"FILE: 1 refused, 0 warnings: the scheduler does not start with it",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := validated(t, tc.text)
			if (err == nil) != tc.passes {
				t.Errorf("error %v", err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("output (-want +got):\n%s", diff)
			}
		})
	}
}

// What manifests install has nothing to say about.
func TestValidateConfigAcceptsTheManifests(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "manifests", "scheduler-config", "second-*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		findings, err := checkConfig(t.Context(), options.NewOptions(), file)
		if err != nil || len(findings) != 0 {
			t.Errorf("%s: %v %v", file, findings, err)
		}
	}
}

// The start says the same as the check.
func TestAStartThatFailsSaysAllThatIsWrong(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := configHead + "profiles:\n- schedulerName: stowage\n  plugins: {multiPoint: {enabled: [{name: DeviceClaims}]}}\n" +
		"  pluginConfig: [{name: DeviceClaims, args: {filterTimout: 1s}}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	opts := options.NewOptions()
	opts.ConfigFile = file
	err := explained(t.Context(), opts, context.Canceled)
	for _, want := range []string{
		"--config " + file + " is refused:\n", "refused: unknown field \"filterTimout\"\n", "refused: DynamicResources is enabled beside DeviceClaims\n",
		"refused: in preBind, DeviceClaims comes after VolumeBinding\n", "`scheduler --validate-config " + file + "` checks it without a cluster",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
	if strings.Contains(err.Error(), "warning:") {
		t.Errorf("an error of the start has warnings:\n%v", err)
	}
}

// An unreadable kubeconfig and an unknown plugin are told of together.
func TestAStartSaysThatTheKubeconfigIsMissingBesideAllElse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := configHead + "clientConnection: {kubeconfig: /nowhere}\nprofiles:\n- schedulerName: stowage\n  plugins: {multiPoint: {enabled: [{name: DeviceClaim}]}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	opts := options.NewOptions()
	opts.ConfigFile = file
	err := explained(t.Context(), opts, checkKubeconfig(opts))
	for _, want := range []string{
		`"DeviceClaim" does not exist`, "refused: the kubeconfig cannot be read: open /nowhere: no such file or directory\n  field:   clientConnection.kubeconfig\n",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
}

func TestValidateConfigIsGivenAlone(t *testing.T) {
	opts := options.NewOptions()
	opts.ConfigFile = "a"
	err := validateConfig(t.Context(), &bytes.Buffer{}, opts, "b")
	if want := "--validate-config checks the file that it names: give it without --config"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %q", err, want)
	}
	err = validateConfig(t.Context(), &bytes.Buffer{}, options.NewOptions(), filepath.Join(t.TempDir(), "missing.yaml"))
	if err == nil || !strings.Contains(err.Error(), "missing.yaml: no such file") {
		t.Errorf("error %v does not name the file", err)
	}
}

func TestHelpExplainsEveryArgument(t *testing.T) {
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--help"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	const head = `
DeviceClaimsArgs, the arguments of the plugin DeviceClaims:

  They stand in the file of --config, in profiles[].pluginConfig[] with name DeviceClaims, under args.
  "fence.timeout" is the field timeout below fence. Durations have a unit: 300ms, 10s, 10m.

    filterTimeout duration (default 10s)
                filterTimeout bounds the search for devices on one node.`
	if !strings.Contains(out.String(), head) {
		t.Errorf("help lacks\n%s\ngot\n%s", head, out.String())
	}
	words := strings.Join(strings.Fields(out.String()), " ")
	for _, field := range config.Fields() {
		heading := "    " + field.Path + " " + string(field.Kind)
		if field.Default != "" {
			heading += " (default " + field.Default + ")"
		}
		if !strings.Contains(out.String(), heading+"\n") || !strings.Contains(words, strings.Join(strings.Fields(field.Doc), " ")) {
			t.Errorf("help does not explain %s", field.Path)
		}
	}
	for _, line := range strings.Split(argsHelp(), "\n") {
		if len(line) > 104 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	if !strings.Contains(out.String(), "--validate-config") {
		t.Error("help does not name --validate-config")
	}
}

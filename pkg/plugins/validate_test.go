// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package plugins_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/profile"

	"stowage.dev/stowage/pkg/plugins"
)

// load makes a scheduler from a configuration file, as the command does, and returns its profiles.
func load(t *testing.T, file string) profile.Map {
	t.Helper()
	logger, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	config, err := options.LoadConfigFromFile(logger, file)
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewSimpleClientset()
	sched, err := scheduler.New(ctx, client, informers.NewSharedInformerFactory(client, 0), nil,
		func(string) events.EventRecorderLogger { return events.NewFakeRecorder(1) },
		scheduler.WithKubeConfig(&rest.Config{Host: "https://127.0.0.1:1"}), // nobody connects
		scheduler.WithProfiles(config.Profiles...),
		scheduler.WithFrameworkOutOfTreeRegistry(plugins.NewRegistry()))
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := sched.Profiles.Close(); err != nil {
			t.Error(err)
		}
	})
	return sched.Profiles
}

const (
	multiPoint = `
    multiPoint:
      enabled: [{name: DeviceClaims}]
      disabled: [{name: DynamicResources}]`
	postFilter = `
    postFilter:
      enabled: [{name: DeviceClaims}]`
	preBind = `
    preBind:
      enabled: [{name: DeviceClaims}]`
)

func TestValidate(t *testing.T) {
	tests := map[string]struct {
		// profiles are the plugins by profile, one after the other.
		profiles []string
		want     []string
	}{
		"the recommended configuration is accepted": {
			profiles: []string{multiPoint + postFilter + preBind},
		},
		"the recommended configuration in two profiles is accepted": {
			profiles: []string{multiPoint + postFilter + preBind, multiPoint + postFilter + preBind},
		},
		"a scheduler without DeviceClaims is none of our business": {
			profiles: []string{" {}"},
		},
		"DynamicResources in the same profile is refused": {
			profiles: []string{`
    multiPoint:
      enabled: [{name: DeviceClaims}]` + postFilter + preBind},
			want: []string{`profile "profile-0"`, "DynamicResources is enabled beside DeviceClaims", "disabled:\n    - name: DynamicResources"},
		},
		"DynamicResources in another profile is refused": {
			profiles: []string{multiPoint + postFilter + preBind, " {}"},
			want:     []string{`profile "profile-1"`, "DynamicResources is enabled here and DeviceClaims in another profile"},
		},
		"DynamicResources left at one extension point is refused": {
			profiles: []string{multiPoint + postFilter + `
    preBind:
      enabled: [{name: DeviceClaims}, {name: DynamicResources}]`},
			want: []string{"DynamicResources is enabled beside DeviceClaims"},
		},
		"a profile without any plugin for claims is refused": {
			profiles: []string{multiPoint + postFilter + preBind, `
    multiPoint:
      disabled: [{name: DynamicResources}]`},
			want: []string{`profile "profile-1"`, "neither DeviceClaims nor DynamicResources is enabled"},
		},
		"a scheduler without any plugin for claims is refused": {
			profiles: []string{`
    multiPoint:
      disabled: [{name: DynamicResources}]`},
			want: []string{`profile "profile-0"`, "neither DeviceClaims nor DynamicResources is enabled"},
		},
		"our postFilter after preemption is refused": {
			profiles: []string{multiPoint + preBind},
			want:     []string{"in postFilter, DeviceClaims comes after DefaultPreemption", "postFilter:\n    enabled:\n    - name: DeviceClaims"},
		},
		"our preBind after the one for volumes is refused": {
			profiles: []string{multiPoint + postFilter},
			want:     []string{"in preBind, DeviceClaims comes after VolumeBinding", "preBind:\n    enabled:\n    - name: DeviceClaims"},
		},
		"an explicit wrong order is refused": {
			profiles: []string{multiPoint + postFilter + `
    preBind:
      enabled: [{name: VolumeBinding}, {name: DeviceClaims}]`},
			want: []string{"in preBind, DeviceClaims comes after VolumeBinding"},
		},
		"one extension point missing is refused": {
			profiles: []string{multiPoint + postFilter + preBind + `
    reserve:
      disabled: [{name: DeviceClaims}]`},
			want: []string{"DeviceClaims is not enabled in reserve"},
		},
		"all mistakes are told at once": {
			profiles: []string{multiPoint, multiPoint + postFilter},
			want:     []string{`profile "profile-0": in postFilter`, `profile "profile-0": in preBind`, `profile "profile-1": in preBind`},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) { checkProfiles(t, tc.profiles, tc.want) })
	}
}

// Where pods are scheduled in groups, one more order counts.
func TestValidateWithPodGroups(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.GenericWorkload, true)
	checkProfiles(t, []string{multiPoint + postFilter + preBind}, []string{"in podGroupPostFilter, DeviceClaims comes after DefaultPreemption"})
	checkProfiles(t, []string{multiPoint + postFilter + preBind + `
    podGroupPostFilter:
      disabled: [{name: DeviceClaims}]`}, []string{"DeviceClaims is not enabled in podGroupPostFilter"})
	checkProfiles(t, []string{multiPoint + postFilter + preBind + `
    podGroupPostFilter:
      enabled: [{name: DeviceClaims}]`}, nil)
}

// checkProfiles checks what Validate says about profiles with such plugins: nothing if nothing is wanted.
func checkProfiles(t *testing.T, profiles, want []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nprofiles:\n"
	for i, p := range profiles {
		text += "- schedulerName: profile-" + string(rune('0'+i)) + "\n  plugins:" + p + "\n"
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	err := plugins.Validate(load(t, file))
	if (err == nil) != (len(want) == 0) {
		t.Fatalf("error: %v", err)
	}
	for _, part := range want {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error does not contain %q:\n%v", part, err)
		}
	}
}

func TestReadyMadeConfigurationsAreValid(t *testing.T) {
	for name, wantProfiles := range map[string]int{"second-scheduler.yaml": 1, "second-scheduler-numa.yaml": 1, "second-profile.yaml": 2} {
		t.Run(name, func(t *testing.T) {
			profiles := load(t, filepath.Join("..", "..", "manifests", "scheduler-config", name))
			if len(profiles) != wantProfiles {
				t.Errorf("%d profiles, want %d", len(profiles), wantProfiles)
			}
			if err := plugins.Validate(profiles); err != nil {
				t.Error(err)
			}
		})
	}
}

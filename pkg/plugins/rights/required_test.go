// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/kubernetes/pkg/features"
)

// What is required is what the manifests grant, no more and no less.
func TestRequiredRightsAreThoseOfTheManifests(t *testing.T) {
	for file, want := range map[string][]rbacv1.PolicyRule{
		"base/access/scheduler.yaml": clusterRules,
		"numa/scheduler.yaml":        numaRules,
	} {
		if diff := cmp.Diff(granted(t, file), want); diff != "" {
			t.Errorf("%s (-manifest +required):\n%s", file, diff)
		}
	}
}

// Nobody needs rights for what a feature gate turns off.
func TestNoRightIsRequiredForWhatIsTurnedOff(t *testing.T) {
	right := Right{Verb: "list", Group: "resource.k8s.io", Resource: "devicetaintrules"}
	for _, on := range []bool{true, false} {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.DRADeviceTaintRules, on)
		if used(right) != on {
			t.Errorf("with gate %v: required %v", on, used(right))
		}
	}
}

// granted are the rules of the ClusterRole in a file of manifests.
func granted(t *testing.T, file string) []rbacv1.PolicyRule {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "..", "manifests", file))
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		var role rbacv1.ClusterRole
		if err := decoder.Decode(&role); errors.Is(err, io.EOF) {
			t.Fatalf("%s has no ClusterRole", file)
		} else if err != nil {
			t.Fatal(err)
		}
		if role.Kind == "ClusterRole" {
			return role.Rules
		}
	}
}

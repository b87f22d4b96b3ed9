// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// A simulation without DeviceTaintRules does not look for any; one that has some does.
func TestTaintRulesCount(t *testing.T) {
	for name, tc := range map[string]struct {
		pools []string // each has a rule
		want  simulate.State
	}{
		"no rule":                     {nil, simulate.Fits},
		"a rule for another node":     {[]string{"worker-1"}, simulate.Fits},
		"rules for both nodes":        {[]string{"worker-0", "worker-1"}, simulate.Waits},
		"two rules for one node":      {[]string{"worker-1", "worker-1"}, simulate.Fits},
		"a rule for a node not there": {[]string{"worker-9"}, simulate.Fits},
	} {
		t.Run(name, func(t *testing.T) {
			c := snapshottest.New(2, 1)
			c.Pod("a", "pod", 1, 0)
			for i, pool := range tc.pools {
				c.DeviceTaintRules = append(c.DeviceTaintRules, &resourceapi.DeviceTaintRule{
					ObjectMeta: metav1.ObjectMeta{Name: string(rune('a' + i))},
					Spec: resourceapi.DeviceTaintRuleSpec{
						DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: ptr.To(pool)},
						Taint:          resourceapi.DeviceTaint{Key: "example.com/repair", Effect: resourceapi.DeviceTaintEffectNoSchedule},
					},
				})
			}
			why, err := simulate.Explain(t.Context(), &c.Snapshot().Objects, "a", "pod", simulate.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if why.State != tc.want {
				t.Errorf("the pod %s, want that it %s: %s", why.State, tc.want, why.Outcome.Reason)
			}
		})
	}
}

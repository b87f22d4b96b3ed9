// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
)

const own = "stowage.example.com/owned"

func TestOwnTaintIsIgnoredAndOthersCount(t *testing.T) {
	tests := map[string]struct {
		ownTaint string
		taints   func(*resourceapi.ResourceSlice)
		usable   []int
	}{
		"our own":                     {own, tainted(0, own, resourceapi.DeviceTaintEffectNoSchedule), []int{0, 1}},
		"our own, twice":              {own, both(tainted(0, own, resourceapi.DeviceTaintEffectNoSchedule), tainted(0, own, resourceapi.DeviceTaintEffectNoSchedule)), []int{0, 1}},
		"another beside our own":      {own, both(tainted(0, own, resourceapi.DeviceTaintEffectNoSchedule), tainted(0, "lost", resourceapi.DeviceTaintEffectNoSchedule)), []int{1}},
		"another before our own":      {own, both(tainted(1, "lost", resourceapi.DeviceTaintEffectNoExecute), tainted(1, own, resourceapi.DeviceTaintEffectNoSchedule)), []int{0}},
		"our key with another effect": {own, tainted(0, own, resourceapi.DeviceTaintEffectNoExecute), []int{1}},
		"our key, not given":          {"", tainted(0, own, resourceapi.DeviceTaintEffectNoSchedule), []int{1}},
		"no key, not given":           {"", tainted(0, "", resourceapi.DeviceTaintEffectNoSchedule), []int{1}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			store := NewStore(Options{Features: DefaultFeatures(), OwnTaint: test.ownTaint})
			object := slice("s", "n1", devices("d0", "d1"), test.taints)
			before := object.DeepCopy()
			store.SetSlice(object)
			if diff := cmp.Diff(before, object); diff != "" {
				t.Errorf("the object of the informer was changed (-want +got):\n%s", diff)
			}
			m, err := store.View().Matcher(context.Background(), MatcherSpec{})
			if err != nil {
				t.Fatal(err)
			}
			var usable []int
			for _, p := range store.View().ForNode(node("n1")).Pools {
				usable = append(usable, members(judged(m, p).Usable)...)
			}
			if diff := cmp.Diff(test.usable, usable); diff != "" {
				t.Errorf("usable devices (-want +got):\n%s", diff)
			}
		})
	}
}

func both(a, b func(*resourceapi.ResourceSlice)) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
		a(s)
		b(s)
	}
}

// Ownership is switched on and off while pods are being scheduled: no pool may become another one by it, or every
// decision on it would be made again.
func TestOwnTaintChangesNothing(t *testing.T) {
	store := NewStore(Options{Features: DefaultFeatures(), OwnTaint: own})
	store.SetSlice(slice("s", "n1", devices("d0", "d1"), tainted(1, "lost", resourceapi.DeviceTaintEffectNoSchedule)))
	before := store.View()
	store.SetSlice(slice("s", "n1", devices("d0", "d1"), tainted(1, "lost", resourceapi.DeviceTaintEffectNoSchedule),
		tainted(0, own, resourceapi.DeviceTaintEffectNoSchedule), tainted(1, own, resourceapi.DeviceTaintEffectNoSchedule)))
	if store.View() != before {
		t.Error("our own taint made a new view")
	}
	store.SetSlice(slice("s", "n1", devices("d0", "d1"), tainted(1, "lost", resourceapi.DeviceTaintEffectNoSchedule)))
	if store.View() != before {
		t.Error("taking our own taint away made a new view")
	}
}

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// holdersIn lists "device: claims" for all that is held.
func holdersIn(v View) map[string][]string {
	held := map[string][]string{}
	for id, device := range v.All() {
		for _, h := range device.Holders() {
			held[id.String()] = append(held[id.String()], h.Claim.Name)
		}
	}
	return held
}

func TestWithoutIsTheUsageThatIsLeftWhenClaimsLetGo(t *testing.T) {
	index := NewIndex()
	hold := func(claim string, devices ...string) {
		a := &resourceapi.AllocationResult{}
		for _, d := range devices {
			a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{Driver: "d", Pool: d[:1], Device: d[1:]})
		}
		index.Set(ClaimRef{UID: types.UID(claim), Namespace: "default", Name: claim}, a, nil)
	}
	hold("one", "a0", "b0")
	hold("two", "a1")
	hold("both", "a0")
	view := index.View()
	a, b := PoolID{"d", "a"}, PoolID{"d", "b"}

	tests := map[string]struct {
		pools []PoolID
		gone  []string
		want  map[string][]string
		// same are the pools that must keep their identity.
		same []PoolID
	}{
		"nobody":                     {pools: []PoolID{a, b}, want: holdersIn(view), same: []PoolID{a, b}},
		"one of two holders":         {pools: []PoolID{a}, gone: []string{"both"}, want: map[string][]string{"d/a/0": {"one"}, "d/a/1": {"two"}, "d/b/0": {"one"}}, same: []PoolID{b}},
		"the only holder":            {pools: []PoolID{a, b}, gone: []string{"two"}, want: map[string][]string{"d/a/0": {"both", "one"}, "d/b/0": {"one"}}, same: []PoolID{b}},
		"only in the pools asked of": {pools: []PoolID{a}, gone: []string{"one", "both", "two"}, want: map[string][]string{"d/b/0": {"one"}}, same: []PoolID{b}},
		"everybody":                  {pools: []PoolID{a, b}, gone: []string{"one", "both", "two"}, want: map[string][]string{}},
		"a pool where nothing is":    {pools: []PoolID{{"d", "nowhere"}}, gone: []string{"one"}, want: holdersIn(view), same: []PoolID{a, b}},
	}
	before := holdersIn(view)
	revisions := map[uint64]string{view.Revision(): "the index"}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got := view.Without(tc.pools, func(c ClaimRef) bool { return slices.Contains(tc.gone, c.Name) })
			if diff := cmp.Diff(tc.want, holdersIn(got)); diff != "" {
				t.Errorf("held (-want +got):\n%s", diff)
			}
			if n := len(slices.Collect(maps.Keys(tc.want))); got.Len() != n {
				t.Errorf("Len is %d, want %d", got.Len(), n)
			}
			for _, id := range []PoolID{a, b} {
				if same := got.Pool(id) == view.Pool(id); same != slices.Contains(tc.same, id) {
					t.Errorf("pool %s keeps its identity: %v", id, same)
				}
			}
			if other, ok := revisions[got.Revision()]; ok {
				t.Errorf("the revision is also that of %s", other)
			}
			revisions[got.Revision()] = fmt.Sprintf("the view of %q", name)
		})
	}
	if diff := cmp.Diff(before, holdersIn(view)); diff != "" {
		t.Errorf("the view itself changed (-before +after):\n%s", diff)
	}
	if got := (View{}).Without([]PoolID{a}, func(ClaimRef) bool { return true }); got.Len() != 0 {
		t.Errorf("the zero view without anybody holds %d devices", got.Len())
	}
}

package deviceclaims

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// Clones of a cycle state share one: what is made from it must not show in it.
func TestWhatIfIsNeverChanged(t *testing.T) {
	first, second := running("first", "node-a", 1), running("second", "node-a", 1)
	var none *whatIf
	one := none.without(first)
	two := one.without(second)
	back := two.with(first, node("node-a"))
	for name, tc := range map[string]struct {
		got  *whatIf
		want []*v1.Pod
	}{
		"one removed":  {one, []*v1.Pod{first}},
		"two removed":  {two, []*v1.Pod{first, second}},
		"one put back": {back, []*v1.Pod{second}},
	} {
		if len(tc.got.removed) != len(tc.want) {
			t.Errorf("%s: %d pods are removed, want %d", name, len(tc.got.removed), len(tc.want))
		}
		for _, pod := range tc.want {
			if tc.got.removed[pod.UID] == nil {
				t.Errorf("%s: pod %s is not removed", name, pod.Name)
			}
		}
	}

	a, b, c := pending("a", 1), pending("b", 1), pending("c", 1)
	base := none.with(a, node("node-a"))
	withB, withC := base.with(b, node("node-a")), base.with(c, node("node-a"))
	if !slices.Equal(withB.nominees, []*v1.Pod{a, b}) || !slices.Equal(withC.nominees, []*v1.Pod{a, c}) || len(base.nominees) != 1 {
		t.Error("nominated pods of one appear in another")
	}
}

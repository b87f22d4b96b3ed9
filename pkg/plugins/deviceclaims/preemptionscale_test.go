package deviceclaims

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
)

// A pod that no node's devices can place is refused in one attempt, with its explanation, and no node is left for
// preemption to try that it could not help on. A node is decided again only if pods of lower priority hold devices there.
func TestAPodThatFiveThousandNodesCannotPlace(t *testing.T) {
	const nodes, mixed, low = 5000, 40, 7 // of the nodes, 40 have a pod of lower priority with too little, and 7 with enough
	var w world
	w.objects = []runtime.Object{class(testClass)}
	hold := func(name, n string, priority int32, devices ...string) {
		w.claims = append(w.claims, claim(name, allocated(n, devices...), reservedFor(name)))
		w.pods = append(w.pods, running(name, n, priority, name))
	}
	for i := range nodes {
		n := fmt.Sprintf("node-%04d", i)
		w.nodes = append(w.nodes, node(n))
		w.objects = append(w.objects, slice(n, device("gpu-0"), device("gpu-1")))
		switch {
		case i < low:
			hold(n+"-both", n, 1, "gpu-0", "gpu-1")
		case i < mixed:
			hold(n+"-first", n, 9, "gpu-0")
			hold(n+"-second", n, 1, "gpu-1")
		default:
			hold(n+"-both", n, 5, "gpu-0", "gpu-1")
		}
	}
	w.claims = append(w.claims, claim("wanted", counted(2)), claim("impossible", counted(3)))
	h := newHarness(t, w)

	for _, tc := range []struct {
		claim           string
		again, possible int
		want            string
	}{
		{"wanted", mixed, low, `10000 of 10000 gpu devices held`},
		{"impossible", 0, 0, string(allocator.ReasonNoMatch)},
	} {
		p := pending("p-"+tc.claim, 5, tc.claim)
		before := counterValue(t, nodesDecidedAgain)
		a := h.filterAll(p)
		if again := counterValue(t, nodesDecidedAgain) - before; int(again) != tc.again {
			t.Errorf("%s: %v of %d nodes were decided twice, want %d", tc.claim, again, nodes, tc.again)
		}
		possible := 0
		for _, info := range h.nodes {
			if h.plugin.Filter(h.ctx, a.state, p, info).Code() == fwk.Unschedulable {
				possible++
			}
		}
		if possible != tc.possible {
			t.Errorf("%s: %d nodes are left for preemption, want %d", tc.claim, possible, tc.possible)
		}
		status := a.postFilter()
		if message := status.Message() + a.filter["node-0000"]; !strings.Contains(message, tc.want) {
			t.Errorf("%s: message %q does not contain %q", tc.claim, message, tc.want)
		}
	}
}

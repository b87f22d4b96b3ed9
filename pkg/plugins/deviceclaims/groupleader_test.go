package deviceclaims

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
)

// A leader allocated the group's claim for one member, which leaves no note, and ended or was frozen behind the fence. The next one must give
// the claim up: another member came second, or the group does not fit with it. If the first leader's binding takes effect before the question who
// is bound, the claim stays. It is lost only between that question and the write, as long as the API server takes to answer one request.
func TestABindingOfTheLeaderBeforeKeepsTheGroupsClaim(t *testing.T) {
	withGroups(t)
	atFence := func(h *harness) {
		if status := h.filterAll(member(pod("q", "mine"))).reserve("node-a").preBind("node-a"); status.IsSuccess() {
			h.t.Error("the pod passed the fence")
		}
	}
	inTheWay := func(h *harness) {
		g := h.tryGroup(member(pod("p", "mine")), member(pod("q", "mine", "own")))
		g.postFilter(g.fitsAll)
	}
	for name, tc := range map[string]struct {
		gives   func(*harness)
		request string // of the next leader, before which the pod is bound
		lost    bool
	}{
		"at the fence, before the pod is read":     {gives: atFence, request: "get pods"},
		"at the fence, before the claim is read":   {gives: atFence, request: "get/"},
		"at the fence, before the question":        {gives: atFence, request: "list pods"},
		"at the fence, after the question":         {gives: atFence, request: "update/status", lost: true},
		"in the way, before the question":          {gives: inTheWay, request: "list pods"},
		"in the way, after the question":           {gives: inTheWay, request: "update/status", lost: true},
		"at the fence, and the pod is never bound": {gives: atFence, lost: true},
		"in the way, and the pod is never bound":   {gives: inTheWay, lost: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.claims = append(w.claims, claim("own", withSelector(`device.attributes["gpu.example.com"].model == "H100"`)))
			w.groups = []*schedulingapi.PodGroup{group("mine")}
			w.pods = []*v1.Pod{member(pod("p", "mine")), member(pod("q", "mine"))}
			before := newHarness(t, w)
			before.tryGroup(w.pods...).forGood(0).bind("node-a")
			if len(before.api.get("mine").Annotations) > 0 {
				t.Fatal("the first write leaves a note: adapt docs/design/groups.md")
			}
			before.othersTake("gpu-0") // of a list it cannot be told which was first

			next := startHarness(t, w, before.client, before.api)
			bound := false
			binds := func(request string) error {
				if request == tc.request && !bound {
					bound = true
					next.binds(w.pods[0])
				}
				return nil
			}
			next.client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
				return false, nil, binds("list pods")
			})
			next.api.onRequest(binds)
			tc.gives(next)
			if bound != (tc.request != "") {
				t.Fatalf("bound: %t", bound)
			}
			want := state{Devices: []string{"gpu-0"}, Users: []string{"g"}}
			if tc.lost {
				want = state{}
			}
			next.wantState("mine", want)
		})
	}
}

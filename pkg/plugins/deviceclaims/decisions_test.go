// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/klog/v2/textlogger"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
)

// logged returns what was logged at the default verbosity while do ran, without times.
func (h *harness) logged(t *testing.T, do func()) []string {
	t.Helper()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	before := h.ctx
	h.ctx = klog.NewContext(before, logger)
	do()
	h.ctx = before
	var lines []string
	for _, entry := range logger.GetSink().(ktesting.Underlier).GetBuffer().Data() {
		line := fmt.Sprintf("%s %s", entry.Type, entry.Message)
		values := append(entry.WithKVList, entry.ParameterKVList...)
		for i := 0; i+1 < len(values); i += 2 {
			line += fmt.Sprintf(" %v=%v", values[i], values[i+1])
		}
		lines = append(lines, line)
	}
	return lines
}

// refusing has the API server refuse a request.
func refusing(what string) func(request string) error {
	return func(request string) error {
		if request != what {
			return nil
		}
		return apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "c", errors.New("no right to write"))
	}
}

// One line for each decision, with the claim, its pod, the node, the devices and why.
func TestEachDecisionIsOneLineInTheLog(t *testing.T) {
	const h100 = `device.attributes["gpu.example.com"].model == "H100"`
	const onNodeA = " claim=team-a/c pod=team-a/p node=node-a devices=[gpu.example.com/node-a/gpu-0] why="
	const lostTwo = "claim team-a/c gives way: claim team-a/other (UID other-uid) was allocated earlier: device gpu.example.com/node-b/gpu-0; " +
		"claim team-a/d gives way: claim team-a/other (UID other-uid) was allocated earlier: device gpu.example.com/node-b/gpu-1"
	const refused = `resourceclaims.resource.k8s.io "c" is forbidden: no right to write`
	const allocated0 = "INFO Allocated devices" + onNodeA + "smallest devices that fit"
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		pods   []*v1.Pod
		fence  bool
		do     func(h *harness)
		want   []string
	}{
		"devices are chosen and written": {
			do:   func(h *harness) { h.filterAll(pod("p", "c")).bind("node-a") },
			want: []string{allocated0},
		},
		"a pod uses what its claim has": {
			claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor("q"))},
			do:     func(h *harness) { h.filterAll(pod("p", "c")).bind("node-a") },
			want: []string{
				"INFO Reserved an allocated claim" + onNodeA +
					"the claim is allocated already, and the pod can use it on this node",
			},
		},
		"another plugin refuses the pod after devices were chosen": {
			do: func(h *harness) { h.filterAll(pod("p", "c")).reserve("node-a").unreserve("node-a") },
			want: []string{
				allocated0,
				"INFO Gave devices back" + onNodeA + "another plugin kept the pod from being bound",
			},
		},
		"the binding of the pod fails": {
			do: func(h *harness) {
				a := h.filterAll(pod("p", "c"))
				a.bind("node-a")
				a.unreserve("node-a")
			},
			want: []string{
				allocated0,
				"INFO Gave devices back" + onNodeA + "the pod could not be bound",
			},
		},
		"the binding of the pod fails, and it is bound all the same": {
			pods: []*v1.Pod{running("p", "node-a", 0, "c")},
			do: func(h *harness) {
				a := h.filterAll(pod("p", "c"))
				a.bind("node-a")
				a.unreserve("node-a")
			},
			want: []string{
				allocated0,
				"INFO Kept devices" + onNodeA + "the pod is bound although its binding failed",
			},
		},
		"a reservation is given back": {
			claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor("q"))},
			do: func(h *harness) {
				a := h.filterAll(pod("p", "c"))
				a.bind("node-a")
				a.unreserve("node-a")
			},
			want: []string{
				"INFO Reserved an allocated claim" + onNodeA +
					"the claim is allocated already, and the pod can use it on this node",
				"INFO Gave a reservation back" + onNodeA + "the pod could not be bound",
			},
		},
		"the API server refuses the allocation": {
			do: func(h *harness) {
				h.api.onRequest(refusing("update/status"))
				a := h.filterAll(pod("p", "c")).reserve("node-a")
				a.preBind("node-a")
				a.unreserve("node-a")
			},
			want: []string{
				allocated0,
				"INFO Gave devices back" + onNodeA + "claim team-a/c: write allocation and reservation: " + refused,
			},
		},
		"the API server refuses one of two allocations": {
			claims: []*resourceapi.ResourceClaim{claim("c"), claim("d")},
			do: func(h *harness) {
				h.api.onRequest(func(request string) error {
					if h.api.claims[types.NamespacedName{Namespace: testNamespace, Name: "c"}].Status.Allocation == nil {
						return nil
					}
					return refusing("update/")(request)
				})
				a := h.filterAll(pod("p", "c", "d")).reserve("node-b")
				a.preBind("node-b")
				a.unreserve("node-b")
			},
			want: []string{
				"INFO Allocated devices claim=team-a/c pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-0] why=smallest devices that fit",
				"INFO Allocated devices claim=team-a/d pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-1] why=smallest devices that fit",
				"INFO Gave devices back claim=team-a/d pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-1] " +
					"why=claim team-a/d: add the finalizer: " + refused,
				"INFO Gave devices back claim=team-a/c pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-0] " +
					"why=claim team-a/d: add the finalizer: " + refused,
			},
		},
		"the API server refuses a reservation": {
			claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor("q"))},
			do: func(h *harness) {
				h.api.onRequest(refusing("update/status"))
				a := h.filterAll(pod("p", "c")).reserve("node-a")
				a.preBind("node-a")
				a.unreserve("node-a")
			},
		},
		"an allocation that another pod uses is in the way": {
			claims: []*resourceapi.ResourceClaim{
				claim("c", allocated("node-a", "gpu-0"), reservedFor("p", "q"), withSelector(h100)), claim("d", withSelector(h100)),
			},
			do: func(h *harness) { h.filterAll(pod("p", "c", "d")).postFilter() },
			want: []string{
				"INFO Gave a reservation back" + onNodeA + "which kept the pod off other nodes, such as node-b; other pods have reserved it, too",
			},
		},
		"another scheduler was faster": {
			claims: []*resourceapi.ResourceClaim{claim("c"), claim("other")},
			fence:  true,
			do: func(h *harness) {
				a := h.filterAll(pod("p", "c")).reserve("node-a")
				h.othersTake("gpu-0")
				a.preBind("node-a")
				a.unreserve("node-a") // as kube-scheduler does after a failure
			},
			want: []string{
				allocated0,
				"INFO Gave devices back" + onNodeA +
					"claim team-a/c gives way: claim team-a/other (UID other-uid) was allocated earlier: device gpu.example.com/node-a/gpu-0",
			},
		},
		"other schedulers were faster at two claims": {
			claims: []*resourceapi.ResourceClaim{claim("c"), claim("d"), claim("other")},
			fence:  true,
			do: func(h *harness) {
				a := h.filterAll(pod("p", "c", "d")).reserve("node-b")
				h.api.change("other", allocated("node-b", "gpu-0", "gpu-1"))
				a.preBind("node-b")
				a.unreserve("node-b")
			},
			want: []string{
				"INFO Allocated devices claim=team-a/c pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-0] why=smallest devices that fit",
				"INFO Allocated devices claim=team-a/d pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-1] why=smallest devices that fit",
				"INFO Gave devices back claim=team-a/d pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-1] why=" + lostTwo,
				"INFO Gave devices back claim=team-a/c pod=team-a/p node=node-b devices=[gpu.example.com/node-b/gpu-0] why=" + lostTwo,
			},
		},
		"an allocation of the pod's own is given up": {
			claims: []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), withSelector(h100)), claim("d", withSelector(h100))},
			do:     func(h *harness) { h.filterAll(pod("p", "c", "d")).postFilter() },
			want: []string{
				"INFO Gave devices back" + onNodeA + "which kept the pod off other nodes, such as node-b",
			},
		},
		"a pod that is refused is no decision about devices": {
			claims: []*resourceapi.ResourceClaim{claim("c", withSelector("false"))},
			do:     func(h *harness) { h.filterAll(pod("p", "c")).postFilter() },
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			if w.claims = tc.claims; w.claims == nil {
				w.claims = []*resourceapi.ResourceClaim{claim("c")}
			}
			if w.pods = tc.pods; w.pods == nil {
				w.pods = []*v1.Pod{pod("p", "c")}
			}
			if tc.fence {
				w.fence = &config.FenceArgs{Timeout: fenced().fence.Timeout, Jitter: fenced().fence.Jitter}
			}
			h := newHarness(t, w)
			got := h.logged(t, func() { tc.do(h) })
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("log (-want +got):\n%s", diff)
			}
			for _, line := range got {
				if strings.Contains(line, "\n") {
					t.Errorf("more than one line: %q", line)
				}
			}
		})
	}
}

func TestClaimsForExtendedResourcesThatAreRemovedAreInTheLog(t *testing.T) {
	const removed = "INFO Gave devices back claim=team-a/p-extended-resources-%s pod=team-a/p node=%s devices=[%s] " +
		"why=an earlier attempt made the claim for the pod's extended resources, and "
	tests := map[string]struct {
		left func(p *v1.Pod) []*resourceapi.ResourceClaim
		do   func(h *harness, p *v1.Pod)
		want string
	}{
		"no node fits with it": {
			func(p *v1.Pod) []*resourceapi.ResourceClaim {
				return []*resourceapi.ResourceClaim{leftover(p, allocated("node-x", "gpu-0", "gpu-1"))}
			},
			func(h *harness, p *v1.Pod) { h.filterAll(p).postFilter() },
			fmt.Sprintf(removed, "old", "node-x", "gpu.example.com/node-x/gpu-0 gpu.example.com/node-x/gpu-1") + "no node fits with it",
		},
		"there are two": {
			func(p *v1.Pod) []*resourceapi.ResourceClaim {
				second := leftover(p, allocated("node-a", "gpu-0"))
				second.Name, second.UID = "p-extended-resources-zzz", "zzz-uid"
				return []*resourceapi.ResourceClaim{leftover(p), second}
			},
			func(h *harness, p *v1.Pod) { h.filterAll(p).bind("node-b") },
			fmt.Sprintf(removed, "zzz", "node-a", "gpu.example.com/node-a/gpu-0") + "it is not needed",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := containersPod("a=2")
			w := extendedWorld(p)
			w.claims = tc.left(p)
			h := newHarness(t, w)
			if diff := cmp.Diff([]string{tc.want}, h.logged(t, func() { tc.do(h, p) })); diff != "" {
				t.Errorf("log (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAClaimWithoutDevicesHasAnEmptyListInTheLog(t *testing.T) {
	log := &strings.Builder{}
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log)))
	decisions.Log(klog.NewContext(t.Context(), logger), decisions.Evicted, pod("p"), "node-a", claim("c"), nil, "it was evicted for team-a/q")
	if !strings.Contains(log.String(), " devices=[] ") {
		t.Errorf("log %s, want devices=[]", log)
	}
}

// One line for each claim of the evicted pod, with those that it was evicted for.
func TestAnEvictedPodThatIsGoneIsInTheLog(t *testing.T) {
	victim := preempted(running("victim", "node-a", 0, "a", "b"), v1.PodReasonPreemptionByScheduler)
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{
		claim("a", allocated("node-a", "gpu-0"), reservedFor("victim")), claim("b"), claim("wanted"), claim("another"),
	}
	h := newHarness(t, w)
	h.nominator.nominate("node-a", pending("wants", 100, "wanted"), pending("other", 100, "another"))
	got := h.logged(t, func() {
		handler := contention.VictimHandler(h.ctx, h.plugin.handle, h.plugin.shared.account.Tracker)
		handler.OnDelete(running("ended", "node-a", 0, "a"))
		handler.OnDelete(victim)
	})
	const forWhom = "why=it was evicted for team-a/other, team-a/wants"
	want := []string{
		"INFO Evicted pod is gone claim=team-a/a pod=team-a/victim node=node-a devices=[gpu.example.com/node-a/gpu-0] " + forWhom,
		"INFO Evicted pod is gone claim=team-a/b pod=team-a/victim node=node-a devices=[] " + forWhom,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

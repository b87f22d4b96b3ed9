// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"
)

// refusedWith is the status of a pod that found no node, with what the PostFilter plugins have said, as kube-scheduler joins it.
func refusedWith(postFilters ...string) *fwk.Status {
	fit := &framework.FitError{NumAllNodes: 2, Diagnosis: framework.Diagnosis{
		NodeToStatus: framework.NewDefaultNodeToStatus(), PostFilterMsg: fwk.NewStatus(fwk.Unschedulable, postFilters...).Message(),
	}}
	for _, name := range []string{"node-a", "node-b"} {
		fit.Diagnosis.NodeToStatus.Set(name, fwk.NewStatus(fwk.Unschedulable, "Insufficient cpu"))
	}
	return fwk.NewStatus(fwk.Unschedulable).WithError(fit)
}

// notHelpful is what DefaultPreemption says when no node would do without pods of lower priority.
func notHelpful(byNode map[string]string) string {
	fit := &framework.FitError{NumAllNodes: 3, Diagnosis: framework.Diagnosis{NodeToStatus: framework.NewDefaultNodeToStatus()}}
	for name, reason := range byNode {
		fit.Diagnosis.NodeToStatus.Set(name, fwk.NewStatus(fwk.Unschedulable, reason))
	}
	fit.Diagnosis.NodeToStatus.SetAbsentNodesStatus(fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "Preemption is not helpful for scheduling"))
	return "preemption: " + fit.Error()
}

// Nobody is told of preemption that found nobody, neither by the event nor by the condition.
func TestPreemptionThatFoundNobodyIsNotTold(t *testing.T) {
	const (
		ours      = `request "gpu" of claim wanted: 3 of 3 gpu devices held`
		nodes     = "0/2 nodes are available: 2 Insufficient cpu."
		gang      = "rejectPod: gang team-a/g gets rejected: podgroup is not satisfied."
		groupText = "pod group is unschedulable"
	)
	nobody := notHelpful(map[string]string{"node-a": "No preemption victims found for incoming pod", "node-b": "Insufficient cpu"})
	inTheWay := notHelpful(map[string]string{"node-a": "the volume is in use", "node-b": "Insufficient cpu"})
	groupError := errors.New(groupText)
	for name, tc := range map[string]struct {
		status *fwk.Status
		want   string
	}{
		"no node would do":                      {refusedWith(ours, nobody), nodes + " " + ours},
		"no node would do, nothing else to say": {refusedWith(nobody), nodes},
		"something else is in the way after the evictions": {
			refusedWith(ours, inTheWay, gang),
			nodes + " " + ours + ", preemption: 0/3 nodes are available: " +
				"1 Insufficient cpu, 1 Preemption is not helpful for scheduling, 1 the volume is in use., " + gang,
		},
		"no node may be tried":                   {refusedWith(ours, notHelpful(nil)), nodes + " " + ours},
		"a further plugin has something to say":  {refusedWith(ours, nobody, gang), nodes + " " + ours + ", " + gang},
		"only a further plugin has":              {refusedWith(nobody, gang), nodes + " " + gang},
		"the pod may not preempt":                {refusedWith(ours, "preemption: not eligible due to preemptionPolicy=Never."), nodes + " " + ours},
		"an extender is against all candidates":  {refusedWith(ours, "preemption: no candidate node for preemption", gang), nodes + " " + ours + ", " + gang},
		"preemption is not asked":                {refusedWith(ours), nodes + " " + ours},
		"the victims are found":                  {refusedWith("preemption: found a potential placement for pod on node node-a, preempting 1 victims"), nodes + " preemption: found a potential placement for pod on node node-a, preempting 1 victims"},
		"a victim is still there":                {refusedWith(ours, "preemption: not eligible due to a terminating pod on the nominated node."), nodes + " " + ours + ", preemption: not eligible due to a terminating pod on the nominated node."},
		"preemption fails":                       {refusedWith("preemption: no nodes available"), nodes + " preemption: no nodes available"},
		"a group finds nobody":                   {fwk.NewStatus(fwk.Unschedulable, groupText+", pod group preemption: No preemption victims found for incoming preemptor").WithError(groupError), groupText + ", " + groupText},
		"a group may not preempt":                {fwk.NewStatus(fwk.Unschedulable, ours+", pod group preemption: not eligible due to preemptionPolicy=Never.").WithError(groupError), groupText + ", " + ours},
		"a group finds nobody, nothing else":     {fwk.NewStatus(fwk.Unschedulable, "pod group preemption: No preemption victims found for incoming preemptor").WithError(groupError), groupText},
		"a group finds victims":                  {fwk.NewStatus(fwk.Unschedulable, "pod group preemption: found a placement for podgroup, preempting 2 victims").WithError(groupError), groupText + ", pod group preemption: found a placement for podgroup, preempting 2 victims"},
		"an error that looks like it is no text": {fwk.AsStatus(errors.New("preemption: no candidate node for preemption")), "preemption: no candidate node for preemption"},
	} {
		t.Run(name, func(t *testing.T) {
			before := tc.status.AsError()
			handled, event := handle(tc.status)
			if diff := cmp.Diff(tc.want, handled.Message()); diff != "" {
				t.Errorf("condition (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff("Warning FailedScheduling "+tc.want, event); diff != "" {
				t.Errorf("event (-want +got):\n%s", diff)
			}
			if handled.Code() != tc.status.Code() || !errors.Is(handled.AsError(), before) {
				t.Errorf("handed on: %v of %v, want code %v and the error that there was", handled.Code(), handled.AsError(), tc.status.Code())
			}
		})
	}
}

// Whoever comes after the plugin is asked, whether or not somebody can be evicted: preemption takes back a nomination that holds no more,
// and other plugins have something else to do, such as to let go of a gang.
func TestFurtherPostFilterPluginsAreAlwaysAsked(t *testing.T) {
	never := func(p *v1.Pod) *v1.Pod {
		p.Spec.PreemptionPolicy = ptr.To(v1.PreemptNever)
		return p
	}
	for name, tc := range map[string]struct {
		pod, other *v1.Pod
		want       string // of what the plugin says
	}{
		"a pod of lower priority holds the device": {pending("p", 5, "wanted"), running("other", "node-a", 1, "held"), "1 of 1 gpu devices held"},
		"a pod of equal priority holds it":         {pending("p", 5, "wanted"), running("other", "node-a", 5, "held"), "1 of 1 gpu devices held"},
		"the pod may not preempt":                  {never(pending("p", 5, "wanted")), running("other", "node-a", 1, "held"), "1 of 1 gpu devices held"},
		"the pod's claim does not exist":           {pending("p", 5, "missing"), running("other", "node-a", 1, "held"), ""},
		"the pod needs no devices":                 {pending("p", 5), running("other", "node-a", 9), ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := world{nodes: []*v1.Node{node("node-a")}, objects: []runtime.Object{class(testClass), slice("node-a", device("gpu-0"))}}
			w.pods, w.claims = []*v1.Pod{tc.pod, tc.other}, []*resourceapi.ResourceClaim{claim("wanted"), claim("held")}
			if len(tc.other.Spec.ResourceClaims) > 0 {
				w.claims[1] = claim("held", allocated("node-a", "gpu-0"), reservedFor("other"))
			}
			a := newHarness(t, w).filterAll(tc.pod)
			result, status := a.h.plugin.PostFilter(a.h.ctx, a.state, a.pod, a.statuses)
			if status.Code() != fwk.Unschedulable || result != nil {
				t.Errorf("PostFilter: %v (%v) and %+v, want the plugins after it to be asked, and no nomination changed", status, status.Code(), result)
			}
			if !strings.Contains(status.Message(), tc.want) || tc.want == "" && len(status.Reasons()) > 0 {
				t.Errorf("reasons %q, want %q", status.Reasons(), tc.want)
			}
		})
	}
}

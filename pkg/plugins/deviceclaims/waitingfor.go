package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/helper"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/wakeup"
)

// look says what a waiting pod asks for now.
func (pl *Plugin) look(pod *v1.Pod, inv *inventory.View) *wakeup.Question {
	claims, err := podclaims.Usable(pl.shared.tracker, pod)
	if err != nil {
		pl.shared.gated.keep(pod, err) // it may be another reason than before, or the first one since the pod was tried
		return &wakeup.Question{Err: err, Claims: err.Error()}
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), pl.shared.limits.WakeUp, errEvaluation)
	defer cancel()
	asked, err := pl.ask(ctx, pod, claims, inv, nil)
	if err != nil && pl.shared.gated.keeps(pod) {
		return &wakeup.Question{} // to be tried, so that it is told what is the matter now
	}
	q := pl.question(ctx, pod, asked, inv, err)
	if err == nil && podclaims.GroupOf(pod) == "" && !pl.shared.gated.keeps(pod) {
		q.Places = pl.placesOf(pod, asked)
	}
	return q
}

// placesOf are how many more users the claims have room for that the pod is not a user of. One that is to be allocated has room for the pod
// that it is allocated for, and for others only afterwards. Not asked for are pods of groups, which are tried together, and pods that
// PreEnqueue keeps back, which have to be tried once to be told what is true.
func (pl *Plugin) placesOf(pod *v1.Pod, a *asked) map[types.UID]int {
	places := map[types.UID]int{}
	for _, pc := range a.claims {
		switch {
		case podclaims.IsReservedFor(pc.Claim, pod.UID):
		case pc.Claim.Status.Allocation == nil:
			places[pc.Claim.UID] = 1
		default:
			places[pc.Claim.UID] = pl.shared.books.Places.Left(pc.Claim, pod.UID)
		}
	}
	return places
}

// asked is what a pod asks for.
type asked struct {
	claims []podclaims.Claim
	// unallocated are those of the claims that need an allocation, requests what they ask for; nil if there are none.
	unallocated []*resourceapi.ResourceClaim
	requests    *allocator.Requests
	// extended is about the pod's extended resources, nil if it has none.
	extended *extended.Plan
}

// question puts what a pod asks for in the form of the waiting room. err is why it cannot be asked. Expressions are compiled until ctx ends.
func (pl *Plugin) question(ctx context.Context, pod *v1.Pod, a *asked, inv *inventory.View, err error) *wakeup.Question {
	q := &wakeup.Question{
		Err: err, Undecided: errors.Is(err, errEvaluation), Requests: a.requests, Classes: map[string]*inventory.Class{}, Uncertain: podclaims.GroupOf(pod) != "",
	}
	unallocated := a.unallocated
	if a.extended != nil && err == nil {
		var v *extended.Variant
		if v, q.Opaque = pl.extended.Asked(ctx, a.extended); v != nil {
			q.Requests, unallocated = v.Requests, append(slices.Clip(unallocated), v.Claim)
		}
	}
	for _, claim := range unallocated {
		for _, name := range classesOf(claim) {
			q.Classes[name] = inv.Class(name)
		}
	}
	if a.extended != nil {
		// Also where the claim cannot be compiled, or differs by node: the resolver may know a class that the inventory does not know yet.
		for _, name := range a.extended.Names {
			if class := pl.extended.ClassOf(name); class != nil {
				q.Classes[class.Name] = inv.Class(class.Name)
			}
		}
	}
	if contention.MayPreempt(pod) && podclaims.GroupOf(pod) == "" {
		q.Evicts = evictsOf(corev1helpers.PodPriority(pod), a)
	}
	// What has been given on trial is going to be decided anew.
	onTrial := func(pc podclaims.Claim) bool { return pc.Shared != nil }
	q.Opaque = q.Opaque || slices.ContainsFunc(a.claims, onTrial)
	pins := slices.DeleteFunc(slices.Clone(a.claims), func(pc podclaims.Claim) bool { return pc.Nodes == nil || onTrial(pc) })
	if len(pins) > 0 {
		q.OnNode = func(node *v1.Node) bool {
			return !slices.ContainsFunc(pins, func(pc podclaims.Claim) bool { return !pc.Nodes.Match(node) })
		}
		pl.askElsewhere(ctx, q, pins, unallocated, inv)
	}
	var state []byte
	for _, pc := range a.claims {
		broken, adoptedUntil := pl.binder.IsBroken(pc.Claim), pl.binder.AdoptedUntil(pc.Claim, pod.UID, pc.User.UID)
		state = fmt.Appendf(state, "%s/%x/%t/%t;", pc.Claim.UID, allocationHash(pc.Claim), broken, !adoptedUntil.IsZero())
		if !broken {
			q.ChangesAt = sooner(q.ChangesAt, pl.binder.Deadline(pc.Claim))
		}
		q.ChangesAt = sooner(q.ChangesAt, adoptedUntil)
	}
	for _, claim := range a.extended.Made() {
		state = fmt.Appendf(state, "%s/%s;", claim.Namespace, claim.Name)
		q.ChangesAt = sooner(q.ChangesAt, pl.binder.AdoptedUntil(claim, pod.UID))
	}
	if err != nil {
		state = append(state, err.Error()...)
	}
	q.Claims = string(state)
	return q
}

// sooner returns the earlier one of two times, of which zero is none.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// evictsOf tells apart which claims pods of a priority may have others evicted for: none that they use themselves.
func evictsOf(priority int32, a *asked) string {
	evicts := fmt.Sprint(priority)
	for _, pc := range a.claims {
		if pc.Claim.Status.Allocation != nil {
			evicts += " " + string(pc.Claim.UID)
		}
	}
	return evicts
}

// askElsewhere adds what the pod asks for on nodes where its claims cannot be used as they are allocated, if PostFilter may give these
// allocations up. It does so when such a node would do.
func (pl *Plugin) askElsewhere(ctx context.Context, q *wakeup.Question, pins []podclaims.Claim, unallocated []*resourceapi.ResourceClaim, inv *inventory.View) {
	others := func(pc podclaims.Claim) bool {
		return slices.ContainsFunc(pc.Claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
			return ref.UID != pc.User.UID && ref.Resource != "podgroups" // of a pod without a node, that is its own group
		})
	}
	if slices.ContainsFunc(pins, others) {
		return
	}
	q.Movable = true
	claims := slices.Clip(unallocated)
	for _, pc := range pins {
		for _, name := range classesOf(pc.Claim) {
			q.Classes[name] = inv.Class(name)
		}
	}
	if len(pins) == 1 { // else it depends on the node which of them have to move
		anew := pins[0].Claim.DeepCopy()
		anew.Status = resourceapi.ResourceClaimStatus{}
		claims = append(claims, anew)
	}
	if requests, err := pl.compile(ctx, claims, inv); err == nil {
		q.Elsewhere = requests
	}
}

var allocationSeed = maphash.MakeSeed()

// allocationHash tells allocations apart, 0 stands for none.
func allocationHash(claim *resourceapi.ResourceClaim) uint64 {
	if claim.Status.Allocation == nil {
		return 0
	}
	content, err := claim.Status.Allocation.Marshal()
	if err != nil {
		content = []byte(claim.ResourceVersion) // as if every change of the claim were one of its allocation
	}
	return maphash.Bytes(allocationSeed, content) | 1
}

// classesOf are the names of the classes that a claim asks for.
func classesOf(claim *resourceapi.ResourceClaim) []string {
	var classes []string
	for i := range claim.Spec.Devices.Requests {
		request := &claim.Spec.Devices.Requests[i]
		if request.Exactly != nil {
			classes = append(classes, request.Exactly.DeviceClassName)
		}
		for j := range request.FirstAvailable {
			classes = append(classes, request.FirstAvailable[j].DeviceClassName)
		}
	}
	return classes
}

// configured is the part of kube-scheduler's framework that says how a profile is made up.
type configured interface {
	ListPlugins() *schedulerconfig.Plugins
	QueueSortFunc() fwk.LessFunc
}

// profile is what the waiting room needs to know of the plugin's profile.
type profile struct {
	// filters are the Filter plugins.
	filters map[string]bool
	less    fwk.LessFunc
}

// readProfile looks at the profile, which is complete only after all its plugins have been made.
func readProfile(handle fwk.Handle) *profile {
	p := &profile{filters: map[string]bool{}, less: byPriorityAndAge}
	c, ok := handle.(configured)
	if !ok {
		return p
	}
	plugins := c.ListPlugins()
	if plugins == nil {
		return p
	}
	for _, filter := range plugins.Filter.Enabled {
		p.filters[filter.Name] = true
	}
	if len(plugins.QueueSort.Enabled) > 0 {
		p.less = c.QueueSortFunc()
	}
	return p
}

// suitable returns whether a pod may be on a node by the node's labels and taints. What is false is so for certain: only plugins are
// asked for that the profile has. EventsToRegister has the changes that matter to it.
func (pl *Plugin) suitable(logger klog.Logger, pod *v1.Pod) func(*v1.Node) bool {
	filters := pl.profile().filters
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	return func(node *v1.Node) bool {
		if filters[names.NodeAffinity] {
			if match, err := affinity.Match(node); err == nil && !match {
				return false
			}
		}
		if filters[names.TaintToleration] {
			if _, untolerated := corev1helpers.FindMatchingUntoleratedTaint(logger, node.Spec.Taints, pod.Spec.Tolerations, helper.DoNotScheduleTaintsFilterFunc(), true); untolerated {
				return false
			}
		}
		if filters[names.NodeUnschedulable] && node.Spec.Unschedulable {
			taint := &v1.Taint{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule}
			return corev1helpers.TolerationsTolerateTaint(logger, pod.Spec.Tolerations, taint, true)
		}
		return true
	}
}

// queueKey is what the order of the scheduling queue looks at. A pod's age counts from its creation and not from its last attempt, so
// that nobody is overtaken by being tried.
func queueKey(pod *v1.Pod) *framework.QueuedPodInfo {
	return &framework.QueuedPodInfo{
		PodInfo:        &framework.PodInfo{Pod: pod},
		QueueingParams: framework.QueueingParams{Timestamp: pod.CreationTimestamp.Time},
	}
}

// byPriorityAndAge is the order of kube-scheduler's own QueueSort plugin.
func byPriorityAndAge(a, b fwk.QueuedEntityInfo) bool {
	if a.GetPriority() != b.GetPriority() {
		return a.GetPriority() > b.GetPriority()
	}
	return a.GetTimestamp().Before(b.GetTimestamp())
}

// before tells whether the queue would take a before b. All profiles of a scheduler have the same order.
func (pl *Plugin) before(a, b *framework.QueuedPodInfo) bool {
	return pl.profile().less(a, b)
}

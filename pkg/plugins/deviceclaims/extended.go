package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	resourcehelper "k8s.io/component-helpers/resource"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/util"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/twopaths"
	"stowage.dev/stowage/pkg/usage"
)

// Reasons why a node is refused for a pod with extended resources, see filter.go.
const (
	reasonClassGone     = "node(s) without a device plugin for an extended resource whose device class is gone"
	reasonPluginLeaving = "node(s) where pods still hold devices of an extended resource that the device plugin no longer provides"
	reasonClaimRecorded = "node(s) whose device plugin provides the extended resources, for which the pod's status already names a claim"
	reasonUnseen        = "node(s) where pods have devices from a device plugin, and the node's agent has not told yet which these are"
	reasonGivenToClaims = "node(s) where claims have devices that the device plugin may give to the pod, too"
	reasonClaimOutdated = "node(s) where the claim of an earlier attempt is not what the pod's extended resources need"
)

// unbornPrefix begins the name of a claim for extended resources before it is created, in messages. No claim that exists has such a name.
const unbornPrefix = "<extended-resources of "

// isUnborn tells whether a claim has the name of one that is not created yet.
func isUnborn(name string) bool { return strings.HasPrefix(name, unbornPrefix) }

// extendedPlan is what PreFilter found out about a pod's extended resources (KEP-5004).
//
// A node either has a device plugin for a resource, seen by what it has of it in status.allocatable, or it gives
// its devices to claims, if a DeviceClass stands for the resource. A cluster may have both kinds of nodes. The pod
// needs a claim only on the latter, and what is in that claim depends on which of its resources the node's device
// plugins provide.
//
// NodeResourcesFit looks at the same node and asks the same resolver. What it leaves to claims must be decided
// here, or the pod would be bound without devices.
type extendedPlan struct {
	pod *v1.Pod
	// names are what the pod asks for and a class may stand for, ordered.
	names []v1.ResourceName
	// backed are the names for which a class stood in PreFilter.
	backed sets.Set[v1.ResourceName]
	// recorded tells that the pod's status names a claim, or may. It can be replaced and not be taken back, and a
	// kubelet that finds it does not start the pod without that claim.
	recorded bool

	// adopted is the allocated claim of an earlier attempt, which the pod uses again if it can. It is also among the
	// plan's claims.
	adopted *resourceapi.ResourceClaim
	// leftovers are other claims of earlier attempts.
	leftovers []*resourceapi.ResourceClaim

	// unborn is the claim to be made, without requests.
	unborn *resourceapi.ResourceClaim
	// requests are what the pod's claims without allocation ask for, nil if there are none.
	requests *allocator.Requests
	// compile compiles the pod's claims without allocation and one more claim, until the context ends.
	compile func(context.Context, *resourceapi.ResourceClaim) (*allocator.Requests, error)

	mutex    sync.Mutex
	variants map[string]*variant // by the backings
}

// variant is what one kind of nodes has to satisfy.
type variant struct {
	// claim is the claim to be made, nil if none is needed.
	claim    *resourceapi.ResourceClaim
	mappings []v1.ContainerExtendedResourceRequest
	// requests are the pod's claims without allocation, with the one to be made. Nil if there are none.
	requests *allocator.Requests
	// err says why no node of this kind can be used.
	err error
}

// extendedResources returns the names under which a pod asks for extended resources that a DeviceClass may
// stand for, ordered.
func extendedResources(pod *v1.Pod) []v1.ResourceName {
	var names []v1.ResourceName
	for name, quantity := range resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true}) {
		if !quantity.IsZero() && util.IsDRAExtendedResourceName(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// classOf returns the class that stands for an extended resource, nil if there is none. The resolver is the one
// that NodeResourcesFit decides by.
func (pl *Plugin) classOf(name v1.ResourceName) *resourceapi.DeviceClass {
	manager := pl.handle.SharedDRAManager()
	if manager == nil {
		return nil // then NodeResourcesFit leaves nothing to others
	}
	return manager.DeviceClassResolver().GetDeviceClass(name)
}

// isBacked tells whether a class stands for any of the names.
func (pl *Plugin) isBacked(names []v1.ResourceName) bool {
	return slices.ContainsFunc(names, func(name v1.ResourceName) bool { return pl.classOf(name) != nil })
}

// needsDevices tells whether devices that the tracker and the inventory know of can be what a pod waits for.
func (pl *Plugin) needsDevices(pod *v1.Pod) bool {
	return len(pod.Spec.ResourceClaims) > 0 || pl.isBacked(extendedResources(pod))
}

// madeFor returns the claims that were made for the extended resources of a pod.
func (pl *Plugin) madeFor(pod *v1.Pod) []*resourceapi.ResourceClaim {
	return slices.DeleteFunc(pl.shared.tracker.OwnedBy(pod.Namespace, pod.UID), func(claim *resourceapi.ResourceClaim) bool {
		return !isForExtendedResources(claim)
	})
}

// namesOf returns the names of claims.
func namesOf(claims []*resourceapi.ResourceClaim) []types.NamespacedName {
	names := make([]types.NamespacedName, len(claims))
	for i, claim := range claims {
		names[i] = types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	}
	return names
}

// askExtended adds to what the pod asks for what it asks for as extended resources.
func (pl *Plugin) askExtended(pod *v1.Pod, names []v1.ResourceName, a *asked, inv *inventory.View) error {
	a.extended = pl.planExtended(pod, names)
	a.extended.requests = a.requests
	a.extended.compile = func(ctx context.Context, claim *resourceapi.ResourceClaim) (*allocator.Requests, error) {
		return pl.compile(ctx, append(slices.Clip(a.unallocated), claim), inv)
	}
	adopted := a.extended.adopted
	if adopted == nil {
		return nil
	}
	nodes, err := pl.usableAllocation(pod, adopted)
	if err != nil {
		return err
	}
	a.claims = append(a.claims, podclaims.Claim{Claim: adopted, Nodes: nodes, User: podclaims.UserOf(pod)})
	return nil
}

// planExtended begins the plan for a pod's extended resources.
func (pl *Plugin) planExtended(pod *v1.Pod, names []v1.ResourceName) *extendedPlan {
	e := &extendedPlan{
		pod: pod, names: names, backed: sets.New[v1.ResourceName](),
		recorded: pl.shared.recorded.Has(pod),
		unborn:   unbornClaim(pod),
		variants: map[string]*variant{},
	}
	for _, name := range names {
		if pl.classOf(name) != nil {
			e.backed.Insert(name)
		}
	}
	for _, claim := range pl.madeFor(pod) {
		if e.adopted == nil && mayAdopt(claim, pod) {
			e.adopted = claim
		} else {
			e.leftovers = append(e.leftovers, claim)
		}
	}
	return e
}

// unbornClaim returns a claim that may be made for the pod's extended resources, without requests.
func unbornClaim(pod *v1.Pod) *resourceapi.ResourceClaim {
	claim := newExtendedClaim(pod)
	claim.Name, claim.UID = unbornPrefix+pod.Name+">", uuid.NewUUID()
	return claim
}

// UnbornFor returns the claim that will be made for the extended resources of another pod if it comes to the node, nil
// if it needs none there or has one already.
func (pl *Plugin) UnbornFor(pod *v1.Pod, node *v1.Node) *resourceapi.ResourceClaim {
	if !podclaims.AsksForExtended(pod) || len(pl.madeFor(pod)) > 0 || len(pl.shared.tracker.InFlightFor(pod.UID)) > 0 {
		return nil
	}
	var backings []backing
	for _, name := range extendedResources(pod) {
		if class := pl.classOf(name); class != nil && node.Status.Allocatable.Name(name, resource.DecimalSI).IsZero() {
			backings = append(backings, backing{name, class.Name})
		}
	}
	if len(backings) == 0 {
		return nil
	}
	claim := unbornClaim(pod)
	claim.Spec.Devices.Requests = layOut(pod, backings).requests
	return claim
}

// mayAdopt tells whether the claim of an earlier attempt may be used as it is, as far as it can be told without
// a node. The scheduler may have ended between the claim's allocation and the pod's binding.
func mayAdopt(claim *resourceapi.ResourceClaim, pod *v1.Pod) bool {
	return claim.DeletionTimestamp == nil && claim.Status.Allocation != nil && podclaims.UsedOnlyBy(claim, pod.UID)
}

// requestsOn says what a node has to satisfy. The status refuses the node.
func (pl *Plugin) requestsOn(c *cycle, node fwk.NodeInfo) (*variant, *fwk.Status) {
	e := c.extended
	if e == nil {
		return c.base, nil
	}
	var backings []backing
	scalars := node.GetAllocatable().GetScalarResources()
	for _, name := range e.names {
		if scalars[name] > 0 { // there is a device plugin, and NodeResourcesFit counts
			if mayBeClaimed(pl, c, node, name) {
				c.findings().setUnseen(node.Node().Name)
				return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonGivenToClaims)
			}
			continue
		}
		class := pl.classOf(name)
		switch {
		case class == nil && e.backed.Has(name):
			// NodeResourcesFit may have seen the class just before it went.
			c.findings().setClassless()
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonClassGone)
		case class == nil:
			continue // nobody's, or one that NodeResourcesFit was told to ignore
		case pl.pluginIsLeaving(node, name):
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonPluginLeaving)
		}
		backings = append(backings, backing{name, class.Name})
	}
	if e.recorded && len(backings) == 0 {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonClaimRecorded)
	}
	v := e.variant(c.budget.Evaluate, backings)
	switch {
	case errors.Is(v.err, errEvaluation):
		c.results.setUndecided()
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, allocator.ReasonUndecided.OfNodes())
	case v.err != nil:
		c.findings().setClassless()
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "node(s) refused: "+v.err.Error())
	case e.adopted == nil:
		return v, nil
	case v.claim == nil || !amount.Semantic.DeepEqual(v.claim.Spec, e.adopted.Spec):
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonClaimOutdated)
	}
	// What the extended resources need is allocated already.
	return &variant{requests: c.base.requests, mappings: v.mappings}, nil
}

// made returns the claims that earlier attempts made.
func (e *extendedPlan) made() []*resourceapi.ResourceClaim {
	if e == nil {
		return nil
	}
	if e.adopted == nil {
		return e.leftovers
	}
	return append(slices.Clip(e.leftovers), e.adopted)
}

// question says what the pod waits for where claims provide its extended resources. It is nil if that is nothing, or
// opaque if it cannot be said for all such nodes at once: on some of them a device plugin may provide a part of it.
func (e *extendedPlan) question(ctx context.Context, pl *Plugin) (v *variant, opaque bool) {
	if e.adopted != nil || len(e.backed) == 0 {
		return nil, false
	}
	if e.requests != nil || len(e.backed) > 1 {
		return nil, true
	}
	name := sets.List(e.backed)[0]
	class := pl.classOf(name)
	if class == nil {
		return nil, true // it has gone just now
	}
	within := func(context.Context) (context.Context, context.CancelFunc) { return ctx, func() {} }
	if v = e.variant(within, []backing{{name, class.Name}}); v.err != nil {
		return nil, errors.Is(v.err, errEvaluation) // else no node will do
	}
	return v, false
}

// variant returns what nodes have to satisfy on which claims provide the given resources. What is new is compiled in the time that evaluate
// gives. If that is not enough, nothing is kept, and the variant has errEvaluation.
func (e *extendedPlan) variant(evaluate func(context.Context) (context.Context, context.CancelFunc), backings []backing) *variant {
	var key strings.Builder
	for _, b := range backings {
		fmt.Fprintf(&key, "%s=%s\n", b.resource, b.class)
	}
	e.mutex.Lock()
	defer e.mutex.Unlock()
	v := e.variants[key.String()]
	if v == nil {
		ctx, done := evaluate(context.Background())
		defer done()
		if v = e.newVariant(ctx, backings); !errors.Is(v.err, errEvaluation) {
			e.variants[key.String()] = v
		}
	}
	return v
}

func (e *extendedPlan) newVariant(ctx context.Context, backings []backing) *variant {
	v := &variant{}
	if len(backings) > 0 {
		l := layOut(e.pod, backings)
		if n := l.devices(); n > resourceapi.AllocationResultsMaxSize {
			v.err = fmt.Errorf("the pod needs %d devices for its extended resources, and one claim, which all of them come from, can get %d",
				n, resourceapi.AllocationResultsMaxSize)
			return v
		}
		v.mappings = l.mappings
		v.claim = e.unborn.DeepCopy()
		v.claim.Spec.Devices.Requests = l.requests
	}
	if v.claim == nil {
		v.requests = e.requests
		return v
	}
	v.requests, v.err = e.compile(ctx, v.claim)
	if err, ok := errors.AsType[*allocator.ClaimError](v.err); ok && isUnborn(err.Claim) {
		named := *err
		named.Subject = v.subject(err.Request)
		v.err = &named
	}
	return v
}

// subject names the containers that a request of the claim to be made is for, and what they ask for. Nobody has written that request.
func (v *variant) subject(request string) string {
	var containers []string
	var asked string
	for _, m := range v.mappings {
		if m.RequestName == request {
			containers, asked = append(containers, strconv.Quote(m.ContainerName)), m.ResourceName
		}
	}
	switch len(containers) {
	case 0:
		return "the pod's extended resources"
	case 1:
		return fmt.Sprintf("container %s, %s", containers[0], asked)
	}
	return fmt.Sprintf("containers %s, %s", strings.Join(containers, " and "), asked)
}

// pluginIsLeaving tells whether a node has turned from a device plugin to claims while pods of the device plugin
// are still there. Nobody but the kubelet knows which devices those hold. The kubelet keeps the resource in the
// node's status, with zero, once there has been a device plugin.
func (pl *Plugin) pluginIsLeaving(node fwk.NodeInfo, name v1.ResourceName) bool {
	if _, known := node.GetAllocatable().GetScalarResources()[name]; !known {
		return false
	}
	return slices.ContainsFunc(node.GetPods(), func(info fwk.PodInfo) bool { return hasFromPlugin(pl, info.GetPod(), name) })
}

// hasFromPlugin tells whether a pod with a node has devices of an extended resource from a device plugin, or is about to get some.
func hasFromPlugin(pl *Plugin, pod *v1.Pod, name v1.ResourceName) bool {
	return holdsFromPlugin(pod, name) && len(pl.madeFor(pod)) == 0 && len(pl.shared.tracker.InFlightFor(pod.UID)) == 0
}

// holdsFromPlugin tells whether a pod with a node asks for an extended resource and its status names no claim for
// it. A pod that is being bound just now may have a claim all the same.
func holdsFromPlugin(pod *v1.Pod, name v1.ResourceName) bool {
	asks := func(c *v1.Container) bool { return quantityOf(c, name) > 0 }
	if !slices.ContainsFunc(pod.Spec.Containers, func(c v1.Container) bool { return asks(&c) }) &&
		!slices.ContainsFunc(pod.Spec.InitContainers, func(c v1.Container) bool { return asks(&c) }) {
		return false
	}
	status := pod.Status.ExtendedResourceClaimStatus
	return status == nil || !slices.ContainsFunc(status.RequestMappings, func(m v1.ContainerExtendedResourceRequest) bool {
		return m.ResourceName == string(name)
	})
}

// pluginsOn are the devices that device plugins of the node have, nil if none can be a device of its pools.
func pluginsOn(pl *Plugin, node fwk.NodeInfo, pools []*inventory.NodePool) twopaths.Plugins {
	var plugins twopaths.Plugins
	// The kubelet keeps a resource in the node's status, with zero, once there has been a device plugin.
	for name, n := range node.GetAllocatable().GetScalarResources() {
		if !slices.ContainsFunc(pools, func(p *inventory.NodePool) bool { return twopaths.IsOf(p.ID().Driver, string(name)) }) {
			continue
		}
		capacity := node.Node().Status.Capacity[name]
		count := twopaths.Offer(n, capacity.Value())
		for _, info := range node.GetPods() {
			if pod := info.GetPod(); hasFromPlugin(pl, pod, name) {
				quantity := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true})[name]
				count.Hold(quantity.Value())
			}
		}
		if plugins == nil {
			plugins = twopaths.Plugins{}
		}
		plugins[name] = count
	}
	return plugins
}

// unseen is who has the devices that pods may have from a device plugin, in a view made to decide without them.
var unseen = usage.ClaimRef{UID: "pods-of-a-device-plugin"}

// heldUnseen are the devices of the node's pools that pods may have from device plugins: of these pools all, as long as the agent has not
// told which. Nil if there are none.
func heldUnseen(pl *Plugin, c *cycle, node fwk.NodeInfo) *resourceapi.AllocationResult {
	if len(node.GetAllocatable().GetScalarResources()) == 0 {
		return nil // as most nodes are: the inventory is not asked
	}
	var held *resourceapi.AllocationResult
	pools := c.Inventory.ForNode(node.Node()).Pools
	plugins := pluginsOn(pl, node, pools)
	if plugins == nil {
		return nil
	}
	for _, pool := range pools {
		driver := pool.ID().Driver
		if !plugins.KeepFromClaims(driver, pool) {
			continue
		}
		if held == nil {
			held = &resourceapi.AllocationResult{}
		}
		for i := range pool.Len() {
			held.Devices.Results = append(held.Devices.Results,
				resourceapi.DeviceRequestAllocationResult{Driver: driver, Pool: pool.ID().Pool, Device: pool.Device(i).Name})
		}
	}
	return held
}

// mayBeClaimed tells whether a claim has a device that the node's device plugin for the resource may give to a pod, too: one that the agent
// says it offers or, as long as the agent has not seen all, any.
func mayBeClaimed(pl *Plugin, c *cycle, node fwk.NodeInfo, name v1.ResourceName) bool {
	claimed := func(id usage.PoolID) *usage.Pool {
		return c.View(context.Background(), nil).Pool(id)
	}
	devices := c.Inventory.ForNode(node.Node())
	untold := []usage.PoolID{{Driver: twopaths.DriverOf(string(name)), Pool: node.Node().Name}}
	for _, problem := range devices.Problems {
		if twopaths.IsOf(problem.Pool.Driver, string(name)) {
			untold = append(untold, usage.PoolID(problem.Pool))
		}
	}
	for _, pool := range devices.Pools {
		id := usage.PoolID(pool.ID())
		if !twopaths.IsOf(id.Driver, string(name)) {
			continue
		}
		untold = slices.DeleteFunc(untold, func(u usage.PoolID) bool { return u == id })
		held := claimed(id)
		if held.Len() > 0 && pluginsOn(pl, node, devices.Pools).KeepFromPods(id.Driver, pool, func(device string) bool { return held.Device(device) != nil }) {
			return true
		}
	}
	// A kubelet that starts deletes the node's slices. Until they are back nobody says which devices are whose.
	return slices.ContainsFunc(untold, func(id usage.PoolID) bool { return claimed(id).Len() > 0 })
}

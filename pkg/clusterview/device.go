// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/snapshot"
)

// Network is the node of devices that several nodes can reach.
const Network = "*"

// ID names a device in the cluster.
type ID struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
}

// String is "driver/pool/device", as the API documentation writes it.
func (id ID) String() string { return id.Driver + "/" + id.Pool + "/" + id.Device }

// place tells devices apart that have one ID, because their driver calls pools and devices alike on each node.
type place struct {
	ID
	node string
}

// Device is a published device and who holds it.
type Device struct {
	ID
	// Node is the node that has it, or [Network].
	Node   string
	Object *resourceapi.Device
	// Taints are those of the driver and of DeviceTaintRules.
	Taints  []Taint
	Holders []Holder
	// Incomplete tells that not all slices of its pool are there, or that they contradict each other: nobody gets its devices then.
	Incomplete bool
	// Left is what is left of the counters that it consumes, if nobody holds it, and Overdrawn, if somebody does, tells that claims have more
	// of them than there is. Beside are some of the claims that have other devices with the same counters.
	Left      Left
	Overdrawn bool
	Beside    []Holder
}

// Taint is a device's taint.
type Taint struct {
	Key    string                        `json:"key"`
	Value  string                        `json:"value,omitempty"`
	Effect resourceapi.DeviceTaintEffect `json:"effect"`
	// Rule is the DeviceTaintRule that it is from; empty if its driver has set it.
	Rule string `json:"rule,omitempty"`
	// Partition is the partition of the GPU that has it; empty if it is on the whole GPU, or on each of its partitions.
	Partition string `json:"partition,omitempty"`
}

// Holder is a claim that a device, or a share of one, is allocated to.
type Holder struct {
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	// Pods are the names of the pods that the claim is reserved for, in the claim's namespace.
	Pods []string `json:"pods,omitempty"`
	// Device is the partition that it has, if it is not the whole GPU.
	Device string `json:"device,omitempty"`
	// Profile is that of the partition.
	Profile string `json:"profile,omitempty"`
	// Share is what it takes of a shared device, by capacity.
	Share map[string]string `json:"share,omitempty"`
	// Shared tells that it has a share, of which nothing may be counted.
	Shared bool `json:"-"`
	// Admin tells that it looks at the device and holds nothing (KEP-5018).
	Admin bool `json:"admin,omitempty"`
}

// String is "namespace/pod", or "namespace/claim" where no pod uses the claim.
func (h *Holder) String() string {
	who := "claim " + h.Namespace + "/" + h.Claim
	if len(h.Pods) > 0 {
		who = h.Namespace + "/" + strings.Join(h.Pods, ",")
	}
	return who
}

// Memory is its share of the memory of a device of a driver, which names the capacity with or without its domain. It is empty without one.
func (h *Holder) Memory(driver string) string {
	return cmp.Or(h.Share["memory"], h.Share[driver+"/memory"])
}

// Problems are those of pools, by their slices that count, see [inventory.Counting]: nil for a slice whose devices are given out.
func Problems(s *snapshot.Snapshot) map[*resourceapi.ResourceSlice]*inventory.PoolProblem {
	pools := map[[2]string][]*resourceapi.ResourceSlice{}
	for _, slice := range s.ResourceSlices {
		pool := [2]string{slice.Spec.Driver, slice.Spec.Pool.Name}
		pools[pool] = append(pools[pool], slice)
	}
	problems := map[*resourceapi.ResourceSlice]*inventory.PoolProblem{}
	for _, pool := range pools {
		maps.Copy(problems, inventory.Counting(pool))
	}
	return problems
}

// Devices returns all devices of a snapshot, by node, driver, pool and name, of those slices of a pool that count, see
// [inventory.Counting]. Allocated devices that are not published are there, too, without Object.
func Devices(s *snapshot.Snapshot) []*Device {
	problems := Problems(s)
	var devices []*Device
	var counting []*resourceapi.ResourceSlice
	by, onNode := map[ID]*Device{}, map[place]*Device{}
	of := map[*resourceapi.Device]*Device{}
	for _, slice := range s.ResourceSlices {
		spec := &slice.Spec
		problem, counts := problems[slice]
		if !counts {
			continue
		}
		counting = append(counting, slice)
		for i := range spec.Devices {
			object := &spec.Devices[i]
			d := &Device{ID: ID{spec.Driver, spec.Pool.Name, object.Name}, Object: object, Node: cmp.Or(ptr.Deref(spec.NodeName,
				""), ptr.Deref(object.NodeName, ""), Network), Incomplete: problem != nil}
			for _, taint := range object.Taints {
				d.Taints = append(d.Taints, Taint{Key: taint.Key, Value: taint.Value, Effect: taint.Effect})
			}
			if at := (place{d.ID, d.Node}); onNode[at] == nil {
				by[d.ID], onNode[at], of[object] = cmp.Or(by[d.ID], d), d, d
				devices = append(devices, d)
			}
		}
	}
	addRules(s, devices)
	for _, claim := range s.ResourceClaims {
		if claim.Status.Allocation == nil {
			continue
		}
		for i := range claim.Status.Allocation.Devices.Results {
			result := &claim.Status.Allocation.Devices.Results[i]
			id := ID{result.Driver, result.Pool, result.Device}
			d := cmp.Or(onNode[place{id, nodeOf(claim)}], by[id])
			if d == nil {
				d = &Device{ID: id, Node: cmp.Or(nodeOf(claim), Network)}
				by[id] = d
				devices = append(devices, d)
			}
			d.Holders = append(d.Holders, holderOf(claim, result))
		}
	}
	countCounters(counting, of)
	slices.SortFunc(devices, func(a, b *Device) int {
		return cmp.Or(strings.Compare(a.Node, b.Node), strings.Compare(a.Driver, b.Driver), strings.Compare(a.Pool, b.Pool),
			strings.Compare(a.ID.Device, b.ID.Device))
	})
	return devices
}

// addRules adds the taints of DeviceTaintRules: a rule without a selector is for none, one without driver, pool and device for all.
func addRules(s *snapshot.Snapshot, devices []*Device) {
	for _, rule := range s.DeviceTaintRules {
		selector := rule.Spec.DeviceSelector
		if selector == nil {
			continue
		}
		taint := Taint{Key: rule.Spec.Taint.Key, Value: rule.Spec.Taint.Value, Effect: rule.Spec.Taint.Effect, Rule: rule.Name}
		for _, d := range devices {
			if ptr.Deref(selector.Driver, d.Driver) == d.Driver && ptr.Deref(selector.Pool, d.Pool) == d.Pool &&
				ptr.Deref(selector.Device, d.ID.Device) == d.ID.Device {
				d.Taints = append(d.Taints, taint)
			}
		}
	}
}

func holderOf(claim *resourceapi.ResourceClaim, result *resourceapi.DeviceRequestAllocationResult) Holder {
	h := Holder{
		Namespace: claim.Namespace, Claim: claim.Name, Pods: PodsOf(claim),
		Admin: ptr.Deref(result.AdminAccess, false), Shared: result.ShareID != nil,
	}
	for name, quantity := range result.ConsumedCapacity {
		if amount.Check(quantity) != nil {
			continue // 64 bits have only its end, and to write it may take for ever
		}
		if h.Share == nil {
			h.Share = map[string]string{}
		}
		h.Share[string(name)] = quantity.String()
	}
	return h
}

// PodsOf are the names of the pods that a claim is reserved for.
func PodsOf(claim *resourceapi.ResourceClaim) (pods []string) {
	for _, ref := range claim.Status.ReservedFor {
		if ref.APIGroup == "" && ref.Resource == "pods" {
			pods = append(pods, ref.Name)
		}
	}
	slices.Sort(pods)
	return pods
}

// nodeOf is the node for which a claim is allocated, empty if it is not for a single one by name.
func nodeOf(claim *resourceapi.ResourceClaim) string {
	if a := claim.Status.Allocation; a != nil && a.NodeSelector != nil && len(a.NodeSelector.NodeSelectorTerms) == 1 {
		if term := a.NodeSelector.NodeSelectorTerms[0]; len(term.MatchExpressions) == 0 && len(term.MatchFields) == 1 &&
			len(term.MatchFields[0].Values) == 1 {
			return term.MatchFields[0].Values[0]
		}
	}
	return ""
}

// Text is a string or version attribute, empty without one. Drivers name theirs with or without their domain.
func (d *Device) Text(name string) string {
	a, ok := d.attribute(name)
	switch {
	case !ok:
		return ""
	case a.StringValue != nil:
		return *a.StringValue
	case a.VersionValue != nil:
		return *a.VersionValue
	}
	return ""
}

func (d *Device) attribute(name string) (resourceapi.DeviceAttribute, bool) {
	if d.Object == nil {
		return resourceapi.DeviceAttribute{}, false
	}
	a, ok := d.Object.Attributes[resourceapi.QualifiedName(name)]
	if !ok {
		a, ok = d.Object.Attributes[resourceapi.QualifiedName(d.Driver+"/"+name)]
	}
	return a, ok
}

// memory is the capacity "memory" in bytes, 0 without one.
func (d *Device) memory() int64 {
	if d.Object == nil {
		return 0
	}
	c, ok := d.Object.Capacity["memory"]
	if !ok {
		c = d.Object.Capacity[resourceapi.QualifiedName(d.Driver+"/memory")]
	}
	if amount.Check(c.Value) != nil {
		return 0 // 64 bits have only its end
	}
	return bytesOf(c.Value)
}

// bytesOf is a quantity as far as 64 bits have it; 0 for a negative one.
func bytesOf(q resource.Quantity) int64 { return max(amount.Int64(q), 0) }

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/plugins/ownership"
	"stowage.dev/stowage/pkg/twopaths"
)

// classOf is the DeviceClass for devices of Stowage's driver, by their type.
var classOf = map[string]string{"gpu": "gpu.nvidia.com", "mig": "mig.nvidia.com", "vfio": "vfio.gpu.nvidia.com"}

func (c *cluster) classes() {
	there := sets.New[string]()
	extended := map[string]string{}
	for _, class := range c.s.DeviceClasses {
		there.Insert(class.Name)
		resource := ptr.Deref(class.Spec.ExtendedResourceName, "")
		if other, taken := extended[resource]; taken && resource != "" {
			c.find(Warning, "deviceclass "+class.Name, "Leave extendedResourceName out of one of them.",
				"It has extendedResourceName %s, and so has class %s: the one that was made last is used", resource, other)
		}
		extended[resource] = class.Name
	}
	published := map[string]int{}
	for _, d := range c.devices {
		if d.Driver == driver && d.Object != nil {
			published[classOf[d.Text("type")]]++
		}
	}
	for _, name := range sortedKeys(published) {
		if name != "" && !there.Has(name) {
			c.find(Error, "deviceclass "+name, "kubectl apply -k manifests/base/deviceclasses",
				"It is not there, and %d devices are for it: no claim can name them",
				published[name])
		}
	}
	unknown := map[string][]string{}
	for _, claim := range c.s.ResourceClaims {
		for name := range classesOf(claim) {
			if claim.Status.Allocation == nil && !there.Has(name) {
				unknown[name] = append(unknown[name], claim.Namespace+"/"+claim.Name)
			}
		}
	}
	for _, name := range sortedKeys(unknown) {
		c.find(Error, "deviceclass "+name, "Make the class, or name another one: these are "+some(sets.List(there))+".",
			"It is not there, and claims name it: %s", some(unknown[name]))
	}
}

// classesOf are those that a claim names.
func classesOf(claim *resourceapi.ResourceClaim) sets.Set[string] {
	names := sets.New[string]()
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		if r.Exactly != nil {
			names.Insert(r.Exactly.DeviceClassName)
		}
		for k := range r.FirstAvailable {
			names.Insert(r.FirstAvailable[k].DeviceClassName)
		}
	}
	return names
}

func (c *cluster) selectors() {
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	for _, class := range c.s.DeviceClasses {
		for i, selector := range class.Spec.Selectors {
			if selector.CEL == nil {
				continue
			}
			if result := compiler.CompileCELExpression(selector.CEL.Expression, cel.Options{DisableCostEstimation: true}); result.Error != nil {
				c.find(Error, "deviceclass "+class.Name, "Put it right: kubectl edit deviceclass "+class.Name,
					"spec.selectors[%d].cel.expression does not compile: %s", i, firstLine(result.Error.Error()))
			}
		}
	}
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

func (c *cluster) slices() {
	type pool struct{ driver, name, node string }
	several := map[pool]bool{} // nodes reach it: it has a slice that is not of one alone
	for _, slice := range c.s.ResourceSlices {
		if slice.Spec.NodeName == nil {
			several[pool{slice.Spec.Driver, slice.Spec.Pool.Name, ""}] = true
		}
	}
	problems := clusterview.Problems(c.s)
	of := map[pool][]*resourceapi.ResourceSlice{}
	var pools []pool
	for _, slice := range c.s.ResourceSlices {
		p := pool{slice.Spec.Driver, slice.Spec.Pool.Name, ""}
		if !several[p] { // each node's slices of it are a whole, see inventory.Counting
			p.node = *slice.Spec.NodeName
		}
		if of[p] == nil {
			pools = append(pools, p)
		}
		of[p] = append(of[p], slice)
	}
	told := map[string]bool{} // a pool of several nodes has its problem once
	for _, p := range pools {
		object := fmt.Sprintf("pool %s/%s", p.driver, p.name)
		restart := "Its driver publishes it anew: read its log on that node, and restart it if it says nothing."
		newest := slices.MaxFunc(of[p], func(a, b *resourceapi.ResourceSlice) int {
			return cmp.Compare(a.Spec.Pool.Generation, b.Spec.Pool.Generation)
		})
		generation := newest.Spec.Pool.Generation
		names, gone := map[string]bool{}, map[string]bool{}
		for _, slice := range of[p] {
			if node := ptr.Deref(slice.Spec.NodeName, ""); node != "" && c.nodes[node] == nil && !gone[node] {
				gone[node] = true
				c.find(Warning, object, "kubectl delete resourceslice "+slice.Name+", if the node does not come back.",
					"It is of node %s, which is not there", node)
			}
			if slice.Spec.Pool.Generation < generation {
				if c.older(slice.CreationTimestamp) && c.older(newest.CreationTimestamp) {
					c.find(Warning, object, restart, "Slice %s is of generation %d, and the newest one is %d", slice.Name,
						slice.Spec.Pool.Generation, generation)
				}
				continue
			}
			switch problem, counts := problems[slice]; {
			case !counts:
				c.find(Error, object, restart, "Slice %s does not count beside the others of its pool: its devices are given to nobody", slice.Name)
			case problem != nil && !told[problem.String()]:
				told[problem.String()] = true
				c.find(Error, object, restart, "Its devices are given to nobody: %s", problem.Detail)
			}
			for i := range slice.Spec.Devices {
				name := slice.Spec.Devices[i].Name
				if names[name] {
					c.find(Error, object, restart, "It has two devices of the name %s: its devices are given to nobody", name)
				}
				names[name] = true
			}
		}
	}
	names := namedAlike(c.s.ResourceSlices, c.nodes)
	for _, p := range slices.SortedFunc(maps.Keys(names), func(a, b alike) int {
		return slices.Compare([]string{a.driver, a.pool, a.first, a.other}, []string{b.driver, b.pool, b.first, b.other})
	}) {
		c.find(Error, fmt.Sprintf("pool %s/%s", p.driver, p.pool), "Have the driver call the pool after its node: claims cannot tell them apart.",
			"Nodes %s and %s both have devices of these names: %s", p.first, p.other, some(names[p]))
	}
}

// alike are the nodes first and other of which a driver calls a pool and devices alike.
type alike struct{ driver, pool, first, other string }

// namedAlike are the names of the devices that have one ID on two nodes.
func namedAlike(published []*resourceapi.ResourceSlice, nodes map[string]*v1.Node) map[alike][]string {
	first, names := map[clusterview.ID]string{}, map[alike][]string{}
	for _, slice := range published {
		node := ptr.Deref(slice.Spec.NodeName, "")
		if nodes[node] == nil {
			continue
		}
		for i := range slice.Spec.Devices {
			id := clusterview.ID{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name, Device: slice.Spec.Devices[i].Name}
			if other, known := first[id]; known && other != node {
				p := alike{id.Driver, id.Pool, other, node}
				names[p] = append(names[p], id.Device)
			} else {
				first[id] = node
			}
		}
	}
	return names
}

// sameDevice finds a GPU that is in two pools, by its UUID or its place on the PCI bus of a node.
func (c *cluster) sameDevice() {
	seen := map[string]*clusterview.Device{}
	for _, d := range c.devices {
		if d.Object == nil || d.Text("parentUUID") != "" {
			continue
		}
		bus := d.Text("resource.kubernetes.io/pciBusID")
		if d.Node == clusterview.Network { // each of the machines may have a device at this address
			bus = ""
		}
		for _, key := range []string{d.Text("uuid"), bus} {
			if key == "" {
				continue
			}
			key = d.Node + "\x00" + key
			if other := seen[key]; other != nil && (other.Driver != d.Driver || other.Pool != d.Pool) {
				c.find(Error, "node "+d.Node, "Run one driver on the node: two give out one GPU twice.", "%s and %s are one GPU", other.ID, d.ID)
				break
			}
			seen[key] = d
		}
	}
}

// pluginsOn are what device plugins offer on a node of the hardware of a driver, as the scheduler counts it.
func pluginsOn(node *v1.Node, driver string) twopaths.Plugins {
	plugins := twopaths.Plugins{}
	for resource, quantity := range node.Status.Allocatable {
		if n := amount.Int64(quantity); n > 0 && twopaths.IsOf(driver, string(resource)) {
			capacity := node.Status.Capacity[resource]
			plugins[resource] = twopaths.Offer(n, amount.Int64(capacity))
		}
	}
	return plugins
}

func (c *cluster) devicePlugin() {
	type pool struct{ driver, name, node string }
	of, gpus := map[pool]twopaths.List{}, map[string]bool{}
	for _, g := range clusterview.GPUs(c.s) {
		gpus[g.Driver] = true
	}
	for _, d := range c.devices {
		if d.Object != nil && c.nodes[d.Node] != nil && gpus[d.Driver] { // IMEX channels of compute-domain.nvidia.com are no device plugin's
			p := pool{d.Driver, d.Pool, d.Node}
			of[p] = append(of[p], d.Object)
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(of),
		func(a, b pool) int { return strings.Compare(a.node+a.name+a.driver, b.node+b.name+b.driver) }) {
		plugins, all := pluginsOn(c.nodes[p.node], p.driver), []string{}
		if len(plugins) == 0 {
			continue
		}
		for resource, n := range plugins {
			all = append(all, fmt.Sprintf("%d %s", n.Offered, resource))
		}
		do := "Switch it off on this node (GPU operator: label nvidia.com/gpu.deploy.device-plugin=false). To offer GPUs as nvidia.com/gpu use " +
			"the node agent's --advertise."
		switch {
		case !twopaths.Tells(p.driver, of[p]):
			c.find(Error, "node "+p.node, do,
				"A device plugin offers %s, and pool %s/%s offers the same hardware to claims: one GPU is given to two pods",
				some(all), p.driver, p.name)
		case plugins.Unseen(p.driver, of[p]):
			c.find(Error, "node "+p.node, do,
				"A device plugin offers %s, more than the node agent has seen: until it has, no device of pool %s/%s is given out",
				some(all), p.driver, p.name)
		case slices.ContainsFunc(of[p], func(d *resourceapi.Device) bool { return twopaths.IsTainted(p.driver, d) }):
			c.find(Warning, "node "+p.node, do, "Another device plugin offers %s: claims do not get these GPUs", some(all))
		}
	}
}

func (c *cluster) heldTwice() {
	const do = "Delete the pods of all but one of them; then look at the checks fence and other-schedulers."
	told := map[clusterview.ID]bool{}
	for _, d := range c.devices {
		names, several := holdersOf(d), d.Object != nil && ptr.Deref(d.Object.AllowMultipleAllocations, false)
		if !several && len(names) > 1 && slices.ContainsFunc(d.Holders, isWhole) {
			c.find(Error, "device "+d.ID.String(), do, "%d claims hold it: %s", len(names), some(names))
		}
		if !d.Overdrawn || len(d.Beside) == 0 || told[d.ID] {
			continue
		}
		var others []string // of devices that exclude this one, such as a partition of it
		for i := range d.Beside {
			id := d.ID
			id.Device = d.Beside[i].Device
			told[id] = true
			others = append(others, d.Beside[i].Namespace+"/"+d.Beside[i].Claim+" ("+id.Device+")")
		}
		c.find(Error, "device "+d.ID.String(), do, "%s has it, and others have what is not there beside it: %s", some(names), some(others))
	}
}

// isWhole tells a claim that has all of a device from one that has a share: of a device that is not published any more nothing else tells
// that it could be shared.
func isWhole(h clusterview.Holder) bool { return !h.Admin && !h.Shared }

func (c *cluster) lostDevices() {
	for _, d := range c.devices {
		if d.Object == nil {
			c.find(Warning, "device "+d.ID.String(), "If it does not come back, delete the pods of the claims, so that they get others.",
				"It is not published any more, and is allocated to %s", some(holdersWithAdmin(d)))
		}
	}
}

func holdersWithAdmin(d *clusterview.Device) (names []string) {
	for i := range d.Holders {
		names = append(names, d.Holders[i].Namespace+"/"+d.Holders[i].Claim)
	}
	return names
}

// taints groups tainted devices by node and taint.
func (c *cluster) taints() {
	type key struct{ node, taint, rule string }
	of := map[key][]string{}
	for _, d := range c.devices {
		for _, t := range d.Taints {
			owned := t.Key == ownership.TaintKey && t.Effect == resourceapi.DeviceTaintEffectNoSchedule
			plugin := t.Key == d.Driver+"/"+twopaths.TaintName && t.Value == twopaths.TaintValue // told by its own check
			if owned || plugin || t.Effect == resourceapi.DeviceTaintEffectNone {
				continue
			}
			text := t.Key
			if t.Value != "" {
				text += "=" + t.Value
			}
			k := key{d.Node, text + ":" + string(t.Effect), t.Rule}
			of[k] = append(of[k], d.ID.Device)
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(of),
		func(a, b key) int { return strings.Compare(a.node+a.taint+a.rule, b.node+b.taint+b.rule) }) {
		object, do := "node "+k.node, "docs/runbook.md, Taints, says what each means and what to do."
		if node := c.nodes[k.node]; node == nil {
			object = "devices of no node"
		} else if condition := conditionOf(node); condition != "" {
			do += " The node agent says: " + condition
		}
		from := "their driver"
		if k.rule != "" {
			from, do = "DeviceTaintRule "+k.rule, "kubectl delete devicetaintrule "+k.rule+", when they are to be used again."
		}
		c.find(Warning, object, do, "The taint %s, by %s, is on devices of it: %s", k.taint, from, some(of[k]))
	}
}

// conditionOf is what the agent says of a node on which something is wrong.
func conditionOf(node *v1.Node) string {
	for _, c := range node.Status.Conditions {
		if c.Type == "GPUsReady" && c.Status != v1.ConditionTrue {
			return c.Message
		}
	}
	return ""
}

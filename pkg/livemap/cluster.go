// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/snapshot"
)

// Cluster joins objects as [clusterview.GPUs] does, but only those of pools that a change touches: a change takes as long in a cluster of
// 40,000 devices as in a small one. All methods may be called at any time.
type Cluster struct {
	mu     sync.Mutex
	slices map[string]*resourceapi.ResourceSlice
	claims map[string]*resourceapi.ResourceClaim
	rules  map[string]*resourceapi.DeviceTaintRule
	pods   map[string]*v1.Pod
	pools  map[poolID]*pool
	// drivers has what their pools publish.
	drivers map[string]*published
	// nodes has the pools that have GPUs of a node.
	nodes map[string]map[poolID]bool
	// users has the pods that name a claim.
	users map[string]set

	touchedPools map[poolID]bool
	touchedPods  set
}

type poolID struct{ driver, pool string }

// pool has the names of its slices and of the claims that have devices of it, and its GPUs as of the last call of Changes.
type pool struct {
	slices, claims set
	gpus           []*clusterview.GPU
}

type set map[string]bool

// published has the pools of a driver that have GPUs, and those that have other devices alone.
type published struct{ gpus, others set }

// example is a pool that stands for the driver: one that has GPUs, if there is one. It is empty if nothing is published.
func (p *published) example() (name string, gpus bool) {
	for name := range p.gpus {
		return name, true
	}
	for name := range p.others {
		return name, false
	}
	return "", false
}

// NewCluster returns a cluster without objects.
func NewCluster() *Cluster {
	return &Cluster{
		slices: map[string]*resourceapi.ResourceSlice{}, claims: map[string]*resourceapi.ResourceClaim{},
		rules: map[string]*resourceapi.DeviceTaintRule{}, pods: map[string]*v1.Pod{},
		pools: map[poolID]*pool{}, drivers: map[string]*published{}, nodes: map[string]map[poolID]bool{}, users: map[string]set{},
		touchedPools: map[poolID]bool{}, touchedPods: set{},
	}
}

// Put adds an object, or puts it in the place of the one of that name. Kinds that the map does not show are passed over. Objects are
// read only from then on.
func (c *Cluster) Put(object metav1.Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(object)
	name := snapshot.Reference(object)
	switch object := object.(type) {
	case *resourceapi.ResourceSlice:
		c.slices[name] = object
		c.pool(poolOf(object)).slices[name] = true
	case *resourceapi.ResourceClaim:
		c.claims[name] = object
		for _, id := range poolsOf(object) {
			c.pool(id).claims[name] = true
		}
	case *resourceapi.DeviceTaintRule:
		c.rules[name] = object
		c.touchAll()
	case *v1.Pod:
		c.pods[name] = object
		for _, claim := range claimsOf(object) {
			if c.users[claim] == nil {
				c.users[claim] = set{}
			}
			c.users[claim][name] = true
		}
	}
}

// Delete takes an object away, of which the name counts.
func (c *Cluster) Delete(object metav1.Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(object)
}

// remove takes away what has the object's name, and touches what depends on that name.
func (c *Cluster) remove(object metav1.Object) {
	name := snapshot.Reference(object)
	switch object.(type) {
	case *resourceapi.ResourceSlice:
		if old := c.slices[name]; old != nil {
			delete(c.pool(poolOf(old)).slices, name)
			delete(c.slices, name)
		}
	case *resourceapi.ResourceClaim:
		if old := c.claims[name]; old != nil {
			for _, id := range poolsOf(old) {
				delete(c.pool(id).claims, name)
			}
			delete(c.claims, name)
		}
		maps.Copy(c.touchedPods, c.users[name])
	case *resourceapi.DeviceTaintRule:
		if c.rules[name] != nil {
			c.touchAll()
			delete(c.rules, name)
		}
	case *v1.Pod:
		if old := c.pods[name]; old != nil {
			for _, claim := range claimsOf(old) {
				if delete(c.users[claim], name); len(c.users[claim]) == 0 {
					delete(c.users, claim)
				}
			}
			delete(c.pods, name)
		}
		c.touchedPods[name] = true
	}
}

// pool returns a pool that is about to change.
func (c *Cluster) pool(id poolID) *pool {
	c.touchedPools[id] = true
	p := c.pools[id]
	if p == nil {
		p = &pool{slices: set{}, claims: set{}}
		c.pools[id] = p
	}
	return p
}

func (c *Cluster) touchAll() {
	for id := range c.pools {
		c.touchedPools[id] = true
	}
}

// Changes are what may be different since the last call: the nodes with all their GPUs, and the pods that wait, as JSON.
func (c *Cluster) Changes() (map[Key]Value, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	values := map[Key]Value{}
	touchedNodes := set{}
	for id := range c.touchedPools {
		c.classify(id)
	}
	for id := range c.touchedPools {
		c.join(id, touchedNodes)
	}
	clear(c.touchedPools)
	for node := range touchedNodes {
		value, err := c.node(node)
		if err != nil {
			return nil, err
		}
		values[Key{Node, node}] = value
	}
	for name := range c.touchedPods {
		value, err := c.waiting(name)
		if err != nil {
			return nil, err
		}
		values[Key{Pod, name}] = value
	}
	clear(c.touchedPods)
	return values, nil
}

// join finds the GPUs of a pool anew, and adds the nodes that have or had some of them.
func (c *Cluster) join(id poolID, nodes set) {
	p := c.pools[id]
	for _, g := range p.gpus {
		nodes[g.Node] = true
		if delete(c.nodes[g.Node], id); len(c.nodes[g.Node]) == 0 {
			delete(c.nodes, g.Node)
		}
	}
	if len(p.slices)+len(p.claims) == 0 {
		delete(c.pools, id)
		return
	}
	o := c.published(p)
	if d := c.drivers[id.driver]; d != nil && !d.gpus[id.pool] { // another pool may tell that devices that are gone were GPUs
		if name, _ := d.example(); name != id.pool {
			o.ResourceSlices = append(o.ResourceSlices, c.published(c.pools[poolID{id.driver, name}]).ResourceSlices...)
		}
	}
	for name := range p.claims {
		o.ResourceClaims = append(o.ResourceClaims, c.claims[name])
	}
	o.DeviceTaintRules = slices.Collect(maps.Values(c.rules))
	p.gpus = slices.DeleteFunc(clusterview.GPUs(snapshot.New(o)), func(g *clusterview.GPU) bool {
		return poolID{g.Driver, g.Pool} != id // the claims have devices of other pools, too
	})
	for _, g := range p.gpus {
		nodes[g.Node] = true
		if c.nodes[g.Node] == nil {
			c.nodes[g.Node] = map[poolID]bool{}
		}
		c.nodes[g.Node][id] = true
	}
}

func (c *Cluster) published(p *pool) (o snapshot.Objects) {
	for name := range p.slices {
		o.ResourceSlices = append(o.ResourceSlices, c.slices[name])
	}
	return o
}

// classify notes what a pool publishes. By that of all pools of a driver [clusterview.GPUs] decides whether devices that are gone were
// GPUs: where this changes, all are touched.
func (c *Cluster) classify(id poolID) {
	d := c.drivers[id.driver]
	if d == nil {
		d = &published{gpus: set{}, others: set{}}
		c.drivers[id.driver] = d
	}
	before, beforeGPUs := d.example()
	delete(d.gpus, id.pool)
	delete(d.others, id.pool)
	if other, known := clusterview.NotGPUs(snapshot.New(c.published(c.pools[id])))[id.driver]; known && other {
		d.others[id.pool] = true
	} else if known {
		d.gpus[id.pool] = true
	}
	now, gpus := d.example()
	if gpus != beforeGPUs || (now == "") != (before == "") {
		for other := range c.pools {
			if other.driver == id.driver {
				c.touchedPools[other] = true
			}
		}
	}
	if now == "" {
		delete(c.drivers, id.driver)
	}
}

// node has the node's GPUs of all pools, in the order of [clusterview.GPUs].
func (c *Cluster) node(name string) (Value, error) {
	var gpus []*clusterview.GPU
	for _, id := range slices.SortedFunc(maps.Keys(c.nodes[name]), comparePools) {
		for _, g := range c.pools[id].gpus {
			if g.Node == name {
				gpus = append(gpus, g)
			}
		}
	}
	slices.SortStableFunc(gpus, clusterview.Compare)
	var value Value
	for _, g := range gpus {
		part, err := json.Marshal(g)
		if err != nil {
			return nil, fmt.Errorf("GPU %s/%s/%s: %w", g.Driver, g.Pool, g.Device, err)
		}
		value = append(value, part)
	}
	return value, nil
}

func comparePools(a, b poolID) int {
	return slices.Compare([]string{a.driver, a.pool}, []string{b.driver, b.pool})
}

func poolOf(slice *resourceapi.ResourceSlice) poolID {
	return poolID{slice.Spec.Driver, slice.Spec.Pool.Name}
}

// poolsOf are those that the claim has devices of.
func poolsOf(claim *resourceapi.ResourceClaim) (ids []poolID) {
	if claim.Status.Allocation == nil {
		return nil
	}
	for i := range claim.Status.Allocation.Devices.Results {
		result := &claim.Status.Allocation.Devices.Results[i]
		if id := (poolID{result.Driver, result.Pool}); !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

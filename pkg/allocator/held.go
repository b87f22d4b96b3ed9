package allocator

import (
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/usage"
)

// heldDevices is the set of held devices of one NodePool in one state of usage. It is kept on the NodePool: as
// long as nothing in the pool is taken or given back, it is the answer for every pod.
type heldDevices struct {
	in  *usage.Pool
	set bitset.Set
}

// held returns the devices of the pool that have a holder, by index; nil if there are none.
func held(p *inventory.NodePool, view usage.View) bitset.Set {
	in := view.Pool(usage.PoolID(p.ID()))
	if in == nil {
		return nil
	}
	if known, ok := p.Attached.Load().(*heldDevices); ok && known.in == in {
		return known.set
	}
	known := &heldDevices{in: in, set: bitset.New(p.Len())}
	for name := range in.All() {
		if i := p.Index(name); i >= 0 {
			known.set.Add(i)
		}
	}
	p.Attached.Store(known)
	return known.set
}

package allocator

import (
	"sync"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/usage"
)

// apart is what a pool looks like to claims of different namespaces: where a device's shares are one namespace's, the device is
// held to all others. What it looks like is kept by namespace, with one tally for all namespaces that have no share there. So there are
// at most as many as holders, and one more.
type apart struct {
	owners []owner
	known  sync.Map // namespace, "" for those without a share → *tally
}

// owner is a namespace that has shares of a device that keeps namespaces apart.
type owner struct {
	device    int
	namespace string
}

// ownersOf returns who has shares of the devices of the pool that keep namespaces apart; nil if nobody has. What is held in no namespace
// at all, as in what compat makes of upstream's sets, is nobody's.
func ownersOf(p *inventory.NodePool, in *usage.Pool) []owner {
	if p.Apart() == nil || in == nil {
		return nil
	}
	var owners []owner
	for name, device := range in.All() {
		i := p.Index(name)
		if i < 0 || !p.Apart().Has(i) {
			continue
		}
		first := len(owners)
		for _, h := range device.Holders() {
			if h.ShareID != nil && h.Claim.Namespace != "" && !isAmong(owners[first:], h.Claim.Namespace) {
				owners = append(owners, owner{i, h.Claim.Namespace})
			}
		}
	}
	return owners
}

func isAmong(owners []owner, namespace string) bool {
	for i := range owners {
		if owners[i].namespace == namespace {
			return true
		}
	}
	return false
}

// in returns the tally as it is for claims of the namespace.
func (t *tally) in(p *inventory.NodePool, namespace string) *tally {
	if t.apart == nil {
		return t
	}
	if !isAmong(t.apart.owners, namespace) {
		namespace = ""
	}
	if known, ok := t.apart.known.Load(namespace); ok {
		return known.(*tally)
	}
	next := &tally{state: t.state.without(foreign(t.apart.owners, namespace, p.Len()))}
	known, _ := t.apart.known.LoadOrStore(namespace, next)
	return known.(*tally)
}

// foreign are the devices, of n, of which other namespaces have shares; nil if there are none.
func foreign(owners []owner, namespace string, n int) bitset.Set {
	var set bitset.Set
	for i := range owners {
		if owners[i].namespace != namespace {
			set = addTo(set, owners[i].device, n)
		}
	}
	return set
}

// without returns the state for who must not have the devices. With admin access they can be had as before.
func (s *poolState) without(foreign bitset.Set) *poolState {
	if foreign == nil {
		return s
	}
	next := *s
	next.foreign = foreign
	next.held, next.taken = foreign.Clone(), foreign.Clone()
	next.held.Or(s.held)
	next.taken.Or(s.taken)
	return &next
}

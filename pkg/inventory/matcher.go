// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// MatcherSpec says which devices a request accepts.
type MatcherSpec struct {
	// ClassSelectors and Selectors are the CEL expressions of the class and of the request. All must match;
	// they are tried in this order, and a device that one rejects is not shown to the next.
	ClassSelectors, Selectors []string
	// Capacity is what the request requires of a device's capacity; looked at only with the feature
	// ConsumableCapacity.
	Capacity *resourceapi.CapacityRequirements
	// Tolerations are the request's.
	Tolerations []resourceapi.DeviceToleration
	// IgnoreTaints switches taints off altogether.
	IgnoreTaints bool
	// RefuseBindingConditions rejects devices with binding conditions before any selector.
	RefuseBindingConditions bool
	// Namespace is that of the request. It tells in whose share of the caches things are kept, and nothing else.
	Namespace string
}

// Matcher tells which devices fulfil a MatcherSpec. Matchers of equal specs are usually the same one.
type Matcher struct {
	id          uint32
	spec        MatcherSpec
	features    Features
	slot        int
	expressions []*expression // the class's, then the request's
	// judged is what it says about the devices of equal nodes.
	judged variety[PoolMatch]
}

// PoolMatch is what a matcher says about the devices of one NodePool, by their indexes. Immutable.
type PoolMatch struct {
	matcher *Matcher
	// Match are the devices that pass all selectors and have the required capacity, if nothing of it is taken.
	Match bitset.Set
	// Tainted are those of Match with a taint that is not tolerated. Nil if none.
	Tainted bitset.Set
	// Usable is Match without Tainted.
	Usable bitset.Set
	// Errors are the devices on which a selector failed at run time, having passed those before it, or that
	// cannot tell what the requirements take of their capacity. They are not in Match. Nil if none.
	Errors bitset.Set
	// Small are the devices that pass all selectors and do not have the required capacity. Nil if none.
	Small bitset.Set

	takes [][]amount.Amount // by device; nil if no device of Match allows multiple allocations
}

func (r *PoolMatch) equal(o *PoolMatch) bool {
	return slices.Equal(r.Match, o.Match) && slices.Equal(r.Tainted, o.Tainted) && slices.Equal(r.Errors, o.Errors) &&
		slices.Equal(r.Small, o.Small) &&
		slices.EqualFunc(r.takes, o.takes, slices.Equal[[]amount.Amount])
}

// Takes returns what one allocation of device i, which is in Match and allows multiple allocations, takes of its
// capacity, in the order of NodePool.Capacity(i). Read only.
func (r *PoolMatch) Takes(i int) []amount.Amount { return r.takes[i] }

// Matcher returns the matcher for spec, compiling its selectors unless that was done before. The error is a
// [*CompileError], or that ctx ended before all were compiled.
func (v *View) Matcher(ctx context.Context, spec MatcherSpec) (*Matcher, error) {
	key, owner := spec.key(), spec.Namespace
	if len(spec.Selectors) == 0 && len(spec.Tolerations) == 0 && spec.Capacity == nil {
		owner = classOwner
	}
	return v.caches.matchers.get(ctx, owner, key, func() (made[*Matcher], error) {
		m := &Matcher{
			id: matcherIDs.Add(1), spec: spec, features: v.caches.features,
			expressions: make([]*expression, 0, len(spec.ClassSelectors)+len(spec.Selectors)),
		}
		bytes := int64(len(key))
		for i, text := range slices.Concat(spec.ClassSelectors, spec.Selectors) {
			owner := spec.Namespace
			if i < len(spec.ClassSelectors) {
				owner = classOwner
			}
			expr, err := v.caches.compile(ctx, owner, text)
			if err != nil {
				return made[*Matcher]{}, err
			}
			m.expressions = append(m.expressions, expr)
			bytes += expr.program.Bytes // which it keeps
		}
		return made[*Matcher]{bytes: bytes, in: func(slot int) *Matcher {
			m.slot = slot
			return m
		}}, nil
	})
}

// classOwner has what the caches keep for classes. Namespaces have names.
const classOwner = ""

// matcherIDs numbers the matchers of the process, from 1.
var matcherIDs atomic.Uint32

// ID is a number that no other matcher of the process has; never 0.
func (m *Matcher) ID() uint32 { return m.id }

// key tells specs apart. Lengths before texts keep any two different specs different.
func (s *MatcherSpec) key() string {
	var b strings.Builder
	text := func(t string) {
		b.WriteString(strconv.Itoa(len(t)))
		b.WriteByte(':')
		b.WriteString(t)
	}
	for _, selectors := range [][]string{s.ClassSelectors, s.Selectors} {
		b.WriteString(strconv.Itoa(len(selectors)))
		b.WriteByte(';')
		for _, t := range selectors {
			text(t)
		}
	}
	if s.Capacity != nil {
		for _, name := range slices.Sorted(maps.Keys(s.Capacity.Requests)) {
			quantity := s.Capacity.Requests[name]
			text(string(name))
			text(quantity.String())
		}
	}
	b.WriteByte(';')
	b.WriteString(strconv.FormatBool(s.IgnoreTaints))
	b.WriteString(strconv.FormatBool(s.RefuseBindingConditions))
	if !s.IgnoreTaints {
		for i := range s.Tolerations {
			t := &s.Tolerations[i]
			text(t.Key)
			text(string(t.Operator))
			text(t.Value)
			text(string(t.Effect))
		}
	}
	return b.String()
}

// Known returns what the matcher says about the devices of p if that is kept, otherwise nil.
func (m *Matcher) Known(p *NodePool) *PoolMatch {
	if r := p.matches.get(m.slot); r != nil && r.matcher == m {
		return r
	}
	return nil
}

// On returns what the matcher says about the devices of p. The error is that ctx ended before that was known, which is not kept;
// no device matches then.
func (m *Matcher) On(ctx context.Context, p *NodePool) (*PoolMatch, error) {
	if r := m.Known(p); r != nil {
		return r, nil
	}
	judged, err := m.judge(ctx, p)
	if err != nil {
		none := bitset.New(p.Len())
		return &PoolMatch{matcher: m, Match: none, Usable: none}, err
	}
	r, _ := m.judged.share(judged, (*PoolMatch).equal)
	p.matches.put(m.slot, r)
	return r, nil
}

func (m *Matcher) judge(ctx context.Context, p *NodePool) (*PoolMatch, error) {
	r := &PoolMatch{matcher: m, Match: bitset.New(p.Len())}
	for i, s := range p.Slices {
		alive := m.eligible(p, i)
		for _, expr := range m.expressions {
			if alive.Empty() {
				break
			}
			result, err := expr.on(ctx, s)
			if err != nil {
				return nil, err
			}
			for device := result.failed.Next(0); device >= 0; device = result.failed.Next(device + 1) {
				if alive.Has(device) {
					r.Errors = addDevice(r.Errors, p.starts[i]+device, p.Len())
				}
			}
			alive.And(result.match)
		}
		m.judgeCapacity(p, i, alive, r)
		r.Match.OrAt(p.starts[i], alive)
		if s.tainted == nil || m.spec.IgnoreTaints {
			continue
		}
		alive.And(s.tainted)
		for device := alive.Next(0); device >= 0; device = alive.Next(device + 1) {
			if m.RefusedTaint(&s.Object.Spec.Devices[device]) != nil {
				r.Tainted = addDevice(r.Tainted, p.starts[i]+device, p.Len())
			}
		}
	}
	r.Usable = r.Match
	if r.Tainted != nil {
		r.Usable = r.Match.Clone()
		r.Usable.AndNot(r.Tainted)
	}
	return r, nil
}

// judgeCapacity takes those devices of slice i of p out of alive that do not have the required capacity.
func (m *Matcher) judgeCapacity(p *NodePool, i int, alive bitset.Set, r *PoolMatch) {
	s := p.Slices[i]
	if !m.features.ConsumableCapacity {
		return
	}
	all := m.spec.Capacity != nil && len(m.spec.Capacity.Requests) > 0
	if !all && s.picky == nil && s.shareable == nil {
		return
	}
	for device := alive.Next(0); device >= 0; device = alive.Next(device + 1) {
		if !all && !s.picky.Has(device) && !s.shareable.Has(device) {
			continue
		}
		consumed, ok, err := m.features.Consumption(&s.Object.Spec.Devices[device], m.spec.Capacity)
		index := p.starts[i] + device
		switch {
		case err != nil:
			alive.Remove(device)
			r.Errors = addDevice(r.Errors, index, p.Len())
		case !ok:
			alive.Remove(device)
			r.Small = addDevice(r.Small, index, p.Len())
		case s.shareable.Has(device):
			if r.takes == nil {
				r.takes = make([][]amount.Amount, p.Len())
			}
			capacity := s.capacities[device]
			takes := make([]amount.Amount, 0, len(capacity.Names))
			for _, name := range capacity.Names {
				takes = append(takes, amount.Of(consumed[name]))
			}
			r.takes[index] = takes
		}
	}
}

// eligible are the devices of slice i of p, by their index in the slice, before any selector.
func (m *Matcher) eligible(p *NodePool, i int) bitset.Set {
	s := p.Slices[i]
	n := len(s.Object.Spec.Devices)
	alive := bitset.Full(n)
	for device := range n {
		hidden := s.perDevice != nil && !p.visible.Has(p.starts[i]+device)
		refused := m.spec.RefuseBindingConditions && len(s.Object.Spec.Devices[device].BindingConditions) > 0
		if hidden || refused {
			alive.Remove(device)
		}
	}
	return alive
}

// RefusedTaint returns the first taint of the device that prevents allocation, nil if there is none.
func (m *Matcher) RefusedTaint(device *resourceapi.Device) *resourceapi.DeviceTaint {
	if m.spec.IgnoreTaints {
		return nil
	}
taints:
	for i := range device.Taints {
		taint := &device.Taints[i]
		if !isEffective(taint.Effect) {
			continue
		}
		for _, toleration := range m.spec.Tolerations {
			if resourceclaim.ToleratesTaint(toleration, *taint) {
				continue taints
			}
		}
		return taint
	}
	return nil
}

// Rejections counts the devices of p that each selector is the first to reject: the class's all together, the
// request's one by one. Devices on which a selector failed, or that are too small, are in neither. The error is that ctx ended
// before.
func (m *Matcher) Rejections(ctx context.Context, p *NodePool) (byClass int, bySelector []int, err error) {
	if len(m.spec.Selectors) > 0 {
		bySelector = make([]int, len(m.spec.Selectors))
	}
	for i, s := range p.Slices {
		alive := m.eligible(p, i)
		for k, expr := range m.expressions {
			result, err := expr.on(ctx, s)
			if err != nil {
				return 0, bySelector, err
			}
			rejected := alive.AndNotCount(result.match)
			rejected -= alive.AndCount(result.failed)
			alive.And(result.match)
			if own := k - len(m.spec.ClassSelectors); own >= 0 {
				bySelector[own] += rejected
			} else {
				byClass += rejected
			}
		}
	}
	return byClass, bySelector, nil
}

// Error returns the selector that failed at run time on device i of p, and its error. ofClass tells whether the
// selector is the class's. Without an expression it is the required capacity that cannot be judged. The error is
// nil if nothing failed. What is kept is told even if ctx has ended; interrupted is that ctx ended before it was known.
func (m *Matcher) Error(ctx context.Context, p *NodePool, i int) (expression string, ofClass bool, err, interrupted error) {
	if r, err := m.On(ctx, p); err != nil || !r.Errors.Has(i) {
		return "", false, nil, err
	}
	s := p.SliceOf(i)
	device := i
	for j := range p.Slices {
		if p.Slices[j] == s {
			device -= p.starts[j]
		}
	}
	for k, expr := range m.expressions {
		result, err := expr.on(ctx, s)
		if err != nil {
			return "", false, nil, err
		}
		if result.failed.Has(device) {
			return expr.text, k < len(m.spec.ClassSelectors), expr.why(result, device), nil
		}
	}
	_, _, err = m.features.Consumption(p.devices[i], m.spec.Capacity)
	return "", false, err, nil
}

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/podresources"
)

const (
	// maxEvents is how many XIDs wait to be counted. Of one more it is not found out whose it is.
	maxEvents = 256
	// eventInterval is how old what is known may be when an XID is counted.
	eventInterval = time.Second
	// maxXIDs is how many counters there may be. Others are counted as one, by GPU.
	maxXIDs = 1024
	// maxXIDHolders is for how many holders one XID of a device is counted, in turn of their namespaces.
	maxXIDHolders = 8
	// maxXID is larger than any that NVIDIA has documented.
	maxXID = 1 << 16
	// otherXIDs are those beyond the two.
	otherXIDs = "other"
)

// event is an XID of a GPU.
type event struct {
	gpu      string
	instance *nvml.Instance
	xid      uint64
	at       time.Time
}

// xids counts by whose they are.
type xids map[xidKey]xidCount

type xidKey struct {
	at     podresources.Place
	holder podresources.Holder
	xid    string
}

type xidCount struct {
	n    uint64
	last time.Time
}

// Event takes an event of the GPU of that name. It does not block.
func (e *Exporter) Event(gpu string, what nvml.Event) {
	if what.Kind != nvml.EventXID {
		return
	}
	x := event{gpu: gpu, instance: what.Instance, xid: what.Data, at: e.opts.Clock.Now()}
	select {
	case e.events <- x:
	default:
		e.mu.Lock()
		defer e.mu.Unlock()
		e.xids.count(podresources.Place{GPU: gpu}, nil, x)
	}
}

// Run counts XIDs until ctx ends, each for who has the device at that time.
func (e *Exporter) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case x := <-e.events:
			e.refresh(ctx, eventInterval)
			e.countXID(x)
		}
	}
}

func (e *Exporter) countXID(x event) {
	node := e.opts.GPUs.Node()
	e.mu.Lock()
	defer e.mu.Unlock()
	var places []podresources.Place
	if r := e.readingOf(x.gpu); r != nil && x.instance != nil {
		for _, device := range r.devices {
			// One of a whole GPU instance is each of its MIG devices': whose program it was is not known.
			if device.Instance == *x.instance || device.Instance.GPU == x.instance.GPU && x.instance.Compute == nvml.AllCompute {
				places = append(places, podresources.Place{GPU: x.gpu, MIG: device.UUID})
			}
		}
	}
	if places == nil {
		places = []podresources.Place{{GPU: x.gpu}}
	}
	var holders podresources.Holders
	if node != nil {
		holders = e.holders(e.named(node))
	}
	for _, at := range places {
		e.xids.count(at, holders.Of[at], x)
	}
}

// count adds one for each holder up to maxXIDHolders, and one for nobody if there are none or more.
func (x xids) count(at podresources.Place, holders []podresources.Holder, of event) {
	xid := otherXIDs
	if of.xid <= maxXID {
		xid = strconv.FormatUint(of.xid, 10)
	}
	// Those for whom it has been counted come first, so that a tenant does not get more counters with each new pod.
	holders = slices.Clone(holders)
	slices.SortStableFunc(holders, func(a, b podresources.Holder) int {
		_, ofA := x[xidKey{at, a, xid}]
		_, ofB := x[xidKey{at, b, xid}]
		return cmp.Compare(oneIf(ofB), oneIf(ofA))
	})
	holders = podresources.InTurn(holders)
	if len(holders) == 0 || len(holders) > maxXIDHolders {
		holders = append(holders[:min(len(holders), maxXIDHolders)], podresources.Holder{})
	}
	for _, holder := range holders {
		key := xidKey{at, holder, xid}
		if _, known := x[key]; !known && len(x) >= maxXIDs {
			key = xidKey{podresources.Place{GPU: at.GPU}, podresources.Holder{}, otherXIDs}
		}
		x.add(key, xidCount{1, of.at})
	}
}

func (x xids) add(key xidKey, more xidCount) {
	count := x[key]
	count.n += more.n
	if more.last.After(count.last) {
		count.last = more.last
	}
	x[key] = count
}

// fold moves what was counted for a holder that has left to nobody, and for a MIG device that is gone to its GPU.
func (x xids) fold(current map[podresources.Place][]podresources.Holder, gone func(podresources.Place) bool) {
	for key, count := range x {
		to := key
		if gone(key.at) {
			to.at, to.holder = podresources.Place{GPU: key.at.GPU}, podresources.Holder{}
		}
		if to.holder != (podresources.Holder{}) && !slices.Contains(current[to.at], to.holder) {
			to.holder = podresources.Holder{}
		}
		if to != key {
			delete(x, key)
			x.add(to, count)
		}
	}
}

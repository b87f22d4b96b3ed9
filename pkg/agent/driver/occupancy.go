// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"strings"
	"sync"

	"github.com/fsnotify/fsnotify"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// occupancy is what is held by nobody to whom it is allocated: by claims that are not allocated any more, and by GPUs in quarantine.
type occupancy struct {
	// mu is held while it is compared with what is published, so that the newest is told last.
	mu sync.Mutex
	// left is what such claims hold, by the last look at the ledger.
	left []occupiedPlace
	// quarantined are the GPUs in quarantine, as they could be read last.
	quarantined []prepare.Quarantine
}

// noteLeft takes note of what claims hold that are not allocated any more.
func (a *Agent) noteLeft(left []occupiedPlace) {
	a.occupancy.mu.Lock()
	defer a.occupancy.mu.Unlock()
	a.occupancy.left = left
	a.publishOccupiedLocked()
}

// noteQuarantined takes note of the GPUs in quarantine.
func (a *Agent) noteQuarantined() {
	a.occupancy.mu.Lock()
	defer a.occupancy.mu.Unlock()
	a.publishOccupiedLocked()
}

func (a *Agent) publishOccupiedLocked() {
	var occupied []occupiedPlace
	// A GPU, or a partition, with something of a claim left on it that could not be undone is nobody's.
	quarantined, err := a.claims.Quarantined()
	if err != nil {
		utilruntime.HandleError(err)
	} else {
		a.occupancy.quarantined = quarantined
	}
	for _, q := range a.occupancy.quarantined {
		places := q.Places()
		if places == nil {
			places = []*ledger.Partition{nil}
		}
		for _, at := range places {
			occupied = append(occupied, occupiedPlace{gpu: q.GPU, at: at, claim: q.Holder(), quarantined: true, since: q.Since})
		}
	}
	occupied = append(occupied, a.occupancy.left...)
	gpus := sets.New[string]()
	for _, place := range occupied {
		gpus.Insert(place.gpu)
	}
	n := len(gpus)
	if gpus.Has("") {
		n = len(a.opts.Hardware.inventory.devices())
	}
	occupiedGPUs.Set(float64(n))
	if a.opts.Hardware.withheld.setOccupied(occupied) {
		a.publisher.refresh()
	}
}

// watchQuarantine notices until ctx ends what another agent of this node puts into quarantine: in an update the kubelet may call the one
// that does not publish. Without events the next look at the ledger notices it.
func (a *Agent) watchQuarantine(ctx context.Context) {
	dir := prepare.QuarantineDir(a.opts.StateDir)
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		defer watcher.Close()
		err = watcher.Add(dir)
	}
	if err != nil {
		klog.FromContext(ctx).Info("The quarantine folder cannot be watched, it is only checked periodically",
			"folder", dir, "reason", err.Error())
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-watcher.Events:
			if strings.HasSuffix(event.Name, prepare.QuarantineSuffix) {
				a.noteQuarantined()
			}
		case <-watcher.Errors: // events were lost
			a.noteQuarantined()
		}
	}
}

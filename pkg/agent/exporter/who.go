// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// who is what the kubelet and the ledger have said last of who has which device.
type who struct {
	pods []podresources.Pod
	// podsAt is when the kubelet said so; zero if it never has.
	podsAt      time.Time
	answers     bool // the kubelet has answered the last question
	allocatable []podresources.Devices
	prepared    []podresources.Prepared
	preparedAt  time.Time // when the ledger said so
	// unreadable is how many records of claims cannot be read.
	unreadable int
	problem    string
}

// ask asks the kubelet and reads the ledger. While one of the two does not answer, what it has said counts for podresources.Keep.
func (e *Exporter) ask(ctx context.Context) {
	// The ledger first: it answers at once.
	asked := e.opts.Clock.Now()
	records, ledgerErr := e.opts.Claims()
	if ledgerErr == nil {
		prepared, unreadable := preparedIn(records)
		e.mu.Lock()
		e.who.prepared, e.who.preparedAt, e.who.unreadable = prepared, asked, unreadable
		e.mu.Unlock()
	}
	pods, age, podsErr := e.pods.Pods(ctx)
	podsAt := e.opts.Clock.Now().Add(-age)
	var allocatable []podresources.Devices
	kubeletErr := podsErr
	if podsErr == nil {
		allocatable, kubeletErr = e.opts.Kubelet.Allocatable(ctx)
	}
	problem := ""
	if err := errors.Join(ledgerErr, unlessNotServed(kubeletErr)); err != nil {
		problem = err.Error()
	}
	e.mu.Lock()
	news := problem != e.who.problem
	e.who.answers, e.who.problem = podsErr == nil, problem
	if e.who.pods = pods; pods != nil || podsErr == nil {
		e.who.podsAt = podsAt
	}
	if kubeletErr == nil {
		e.who.allocatable = allocatable
	}
	e.mu.Unlock()
	if news && problem != "" {
		klog.FromContext(ctx).Info("It is not known for certain who uses the GPUs", "reason", problem)
	}
}

// unlessNotServed is nil for a kubelet that is too old for the question.
func unlessNotServed(err error) error {
	if errors.Is(err, podresources.ErrNotServed) {
		return nil
	}
	return err
}

// preparedIn are the devices that the claims of the ledger hold. Devices with admin access are not held. Who has a device of the device
// plugin the kubelet says.
func preparedIn(records []*ledger.Record) (prepared []podresources.Prepared, unreadable int) {
	for _, record := range records {
		switch {
		case record.Entry == nil:
			unreadable++
			continue
		case record.State() != ledger.PrepareCompleted, record.Entry.Claim.Plugin != (ledger.PluginDevice{}):
			continue
		}
		for i := range record.Entry.Devices {
			device := &record.Entry.Devices[i]
			if device.AdminAccess {
				continue
			}
			p := podresources.Prepared{
				Namespace: record.Entry.Claim.Namespace, Name: record.Entry.Claim.Name,
				Pool: device.Pool, Device: device.Device, CDI: device.CDIDeviceIDs, At: podresources.Place{GPU: device.GPU},
			}
			if device.ShareID != nil {
				p.Share = string(*device.ShareID)
			}
			if device.Partition != nil {
				p.At.MIG = device.UUID
			}
			prepared = append(prepared, p)
		}
	}
	return prepared, unreadable
}

// named are the node's GPUs as device plugins name them, with the MIG devices that the last readings have found. The mutex is held.
func (e *Exporter) named(node *discovery.Node) []podresources.GPU {
	named := make([]podresources.GPU, 0, len(node.GPUs))
	for i := range node.GPUs {
		of := &node.GPUs[i]
		n := podresources.GPU{Name: of.Name, UUID: of.UUID, PCIBusID: of.PCIBusID, Minor: of.Minor}
		if of.Bound() || of.Unseen() {
			n.Minor = -1
		}
		if r := e.readingOf(of.Name); r != nil {
			for _, device := range r.devices {
				n.MIG = append(n.MIG, podresources.MIGDevice{
					UUID: device.UUID, GPUInstance: int(device.Instance.GPU), ComputeInstance: int(device.Instance.Compute),
				})
			}
		}
		named = append(named, n)
	}
	return named
}

// readingOf is the last reading, nil if there is none or none that is true still. The mutex is held.
func (e *Exporter) readingOf(name string) *reading {
	g := e.gpus[name]
	if g == nil || g.reading == nil || e.opts.Clock.Since(g.reading.at) > KeepReading {
		return nil
	}
	return g.reading
}

// holders tells who has the devices. The mutex is held.
func (e *Exporter) holders(named []podresources.GPU) podresources.Holders {
	pods, prepared := e.who.pods, e.who.prepared
	if e.opts.Clock.Since(e.who.podsAt) > podresources.Keep {
		pods = nil // nobody has scraped since, and now the kubelet does not answer in time
	}
	if e.opts.Clock.Since(e.who.preparedAt) > podresources.Keep {
		prepared = nil // the same of the ledger, or its disk is ill
	}
	return podresources.HoldersOf(e.opts.Driver, pods, prepared, named)
}

// deviceOf is the name in the ResourceSlice of the MIG device; empty for one that is not offered, and that nobody has.
func (w *who) deviceOf(of *discovery.GPU, uuid string) string {
	if i := slices.IndexFunc(w.prepared, func(p podresources.Prepared) bool { return p.At.MIG == uuid }); i >= 0 {
		return w.prepared[i].Device
	}
	for i := range of.Offers {
		if p := of.Offers[i].Partition; p != nil && p.UUID == uuid {
			return of.Offers[i].Name
		}
	}
	return ""
}

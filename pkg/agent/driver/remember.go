// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// keepMissing adds to what was found the GPUs that were known and do not answer now. A GPU that is lost has to stay in the
// ResourceSlices, or its taint would be gone with it and the pods that have it would never be moved. One that was taken out,
// without anybody holding it, is not kept. What was known of their indices is of another time, and not used: others may have been passed
// through since, put in or taken out.
func keepMissing(found, known *discovery.Node, held func(gpu string) bool) {
	var missing []discovery.GPU
	for _, gpu := range known.GPUs {
		if slices.ContainsFunc(found.GPUs, func(g discovery.GPU) bool { return g.Name == gpu.Name }) {
			continue
		}
		missing = append(missing, gpu)
		for i := range found.Failures {
			if f := &found.Failures[i]; f.PCIBusID == "" && f.UUID != "" && f.UUID == gpu.UUID {
				f.PCIBusID = gpu.PCIBusID
			}
		}
	}
	for _, all := range []bool{false, true} { // those first that NVML numbered before
		var addresses []string
		for i := range missing {
			if all || !missing[i].LeftOut() {
				addresses = append(addresses, missing[i].PCIBusID)
			}
		}
		found.NameFailures(addresses)
	}
	for _, gpu := range missing {
		is := slices.IndexFunc(found.Failures, func(f discovery.Failure) bool { return f.PCIBusID == gpu.PCIBusID })
		if is < 0 { // it may be one of several: NVML numbers it like that, or not at all
			is = slices.IndexFunc(found.Failures, func(f discovery.Failure) bool { return f.UUID == "" && f.MayBe(gpu.Name) })
		}
		switch {
		case is >= 0: // vfio-pci does not have it
			gpu.Index, gpu.Passthrough = found.Failures[is].Index, nil
		case held(gpu.Name):
			gpu.Index = -1
		default:
			continue
		}
		found.GPUs = append(found.GPUs, gpu)
	}
	slices.SortFunc(found.GPUs, func(a, b discovery.GPU) int { return strings.Compare(a.PCIBusID, b.PCIBusID) })
}

// keepBound puts what was known of a GPU that a claim has passed through in the place of the little that is known of it now. What it is
// offered as stays the same that way. One that vfio-pci got without us is no more than that.
func keepBound(found *discovery.Node, known []discovery.GPU, held func(gpu string) bool) {
	for i := range found.GPUs {
		now := &found.GPUs[i]
		before := slices.IndexFunc(known, func(g discovery.GPU) bool { return g.Name == now.Name })
		if !now.Unseen() || before < 0 || known[before].Unseen() || !held(now.Name) {
			continue
		}
		passthrough := now.Passthrough
		*now = known[before]
		now.Passthrough = passthrough
		keepDomain(found, known, now)
	}
}

// keepDomain lets the NVLink domain of a GPU that was passed through keep its name, which may come from that very GPU, as
// long as the others in it still are in one.
func keepDomain(found *discovery.Node, known []discovery.GPU, bound *discovery.GPU) {
	if bound.NVLink == nil || bound.NVLink.Domain == "" {
		return
	}
	domain := bound.NVLink.Domain
	var others []*discovery.GPU
	for i := range found.GPUs {
		gpu := &found.GPUs[i]
		if gpu.NVLink != nil && !gpu.Bound() && slices.ContainsFunc(known, func(g discovery.GPU) bool {
			return g.Name == gpu.Name && g.NVLink != nil && g.NVLink.Domain == domain
		}) {
			others = append(others, gpu)
		}
	}
	for _, gpu := range others {
		if gpu.NVLink.Domain != others[0].NVLink.Domain {
			return
		}
	}
	for _, gpu := range others {
		link := *gpu.NVLink
		link.Domain = domain
		gpu.NVLink = &link
	}
}

// HeldInLedger tells which GPUs prepared claims have, or have left in quarantine, by the state folder of an agent. A ledger that cannot
// be read holds all of them.
func HeldInLedger(stateDir string) func(gpu string) bool {
	return func(gpu string) bool {
		claims, err := ledger.Open(durable.OS{}, prepare.LedgerDir(stateDir))
		if err != nil {
			return true
		}
		holders, err := claims.Holders(gpu)
		return err != nil || len(holders) > 0 || prepare.InQuarantine(stateDir, gpu)
	}
}

// ClaimsIn reads the records of an agent's claims in its state folder. There are none before an agent has made them.
func ClaimsIn(stateDir string) func() ([]*ledger.Record, error) {
	return ledger.At(durable.OS{}, prepare.LedgerDir(stateDir)).Records
}

// gpusOnBus lists NVIDIA's GPUs that the kernel sees, with their drivers: a session sees a GPU that
// the NVIDIA driver had when it was opened.
func gpusOnBus(sysfs fs.ReadLinkFS) []string {
	gpus, err := vfio.GPUs(sysfs)
	if err != nil {
		return nil
	}
	var list []string
	for _, gpu := range gpus {
		list = append(list, gpu.Address+" "+gpu.Driver)
	}
	return list
}

// sameGPUs compares two such lists, which both are in the order of the addresses.
func sameGPUs(a, b []string) bool { return slices.Equal(a, b) }

// knownFile is what is remembered of the GPUs. Fields are only ever added within a version.
type knownFile struct {
	Version int             `json:"version"`
	GPUs    []discovery.GPU `json:"gpus"`
	// MIG is how GPUs can be partitioned, by their names.
	MIG map[string]*discovery.MIG `json:"mig,omitempty"`
	// DriverVersion and CUDADriverVersion are the node's.
	DriverVersion     string `json:"driverVersion,omitempty"`
	CUDADriverVersion string `json:"cudaDriverVersion,omitempty"`
}

const knownVersion = 1

// memory is what an agent knows of GPUs for the one that follows it. Of two agents of a node one leads, and writes it.
type memory struct {
	dir   string // nothing is kept if it is empty
	clock clock.PassiveClock

	// saving is held while what is known is written.
	saving sync.Mutex

	mu sync.Mutex
	// known are the GPUs of an earlier look, or of an earlier agent; nil before that was read.
	known *discovery.Node
	// lead: this agent writes, since leadSince.
	lead      bool
	leadSince time.Time
}

func (m *memory) path() string { return filepath.Join(m.dir, "gpus.json") }

// healthDir is the monitor's.
func healthDir(stateDir string) string {
	if stateDir == "" {
		return ""
	}
	return filepath.Join(stateDir, "health")
}

// add puts what is known of GPUs that do not answer, or that a claim has passed through, in the place of the little that
// is known of them now.
func (m *memory) add(ctx context.Context, node *discovery.Node, held func(gpu string) bool) {
	known := m.before(ctx)
	keepBound(node, known.GPUs, held)
	keepMissing(node, known, held)
}

// before is what was known at the last look, of this agent or of an earlier one. It has no GPUs if there was none.
func (m *memory) before(ctx context.Context) *discovery.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil {
		m.known = m.load(ctx)
	}
	return m.known
}

// keep is for the next look, and for the next agent.
func (m *memory) keep(ctx context.Context, node *discovery.Node) {
	m.mu.Lock()
	m.known = node
	m.mu.Unlock()
	m.save(ctx)
}

// load reads what an earlier agent knew. Without it a GPU that was lost before is not published.
func (m *memory) load(ctx context.Context) *discovery.Node {
	none := &discovery.Node{}
	if m.dir == "" {
		return none
	}
	data, err := durable.OS{}.ReadFile(m.path())
	if errors.Is(err, fs.ErrNotExist) {
		return none
	}
	var file knownFile
	if err == nil {
		err = json.Unmarshal(data, &file)
	}
	if err == nil && file.Version != knownVersion {
		err = errors.New("it is of another version")
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs of an earlier agent are not known", "path", m.path())
		return none
	}
	for i := range file.GPUs {
		file.GPUs[i].MIG = file.MIG[file.GPUs[i].Name]
	}
	return &discovery.Node{DriverVersion: file.DriverVersion, CUDADriverVersion: file.CUDADriverVersion, GPUs: file.GPUs}
}

// save keeps what is known for the next agent, if this is the one that does.
func (m *memory) save(ctx context.Context) {
	// Held from before it is read what is known, so that the newest is written last.
	m.saving.Lock()
	defer m.saving.Unlock()
	m.mu.Lock()
	known, lead := m.known, m.lead
	m.mu.Unlock()
	if !lead || known == nil || known.GPUs == nil || m.dir == "" {
		return
	}
	gpus := known.GPUs
	file := knownFile{
		Version: knownVersion, GPUs: gpus, MIG: map[string]*discovery.MIG{},
		DriverVersion: known.DriverVersion, CUDADriverVersion: known.CUDADriverVersion,
	}
	for i := range gpus {
		if gpus[i].MIG != nil {
			file.MIG[gpus[i].Name] = gpus[i].MIG
		}
	}
	data, err := json.MarshalIndent(file, "", "  ")
	if err == nil {
		var was []byte
		if was, _ = (durable.OS{}).ReadFile(m.path()); string(was) == string(data) {
			return
		}
		err = durable.WriteFile(durable.OS{}, m.path(), data, 0o600)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs cannot be remembered for the next agent", "path", m.path())
	}
}

// begin makes this agent the one that writes.
func (m *memory) begin(ctx context.Context) {
	m.mu.Lock()
	m.lead, m.leadSince = true, m.clock.Now()
	m.mu.Unlock()
	m.save(ctx)
}

// end is begin's reverse: when it returns this agent writes nothing, and will not. also is done before another one may.
func (m *memory) end(also func()) {
	m.saving.Lock()
	defer m.saving.Unlock()
	m.mu.Lock()
	m.lead = false
	m.mu.Unlock()
	also()
}

// justLeads tells whether this agent leads, and not for longer than that.
func (m *memory) justLeads(within time.Duration) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lead && m.clock.Since(m.leadSince) < within
}

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// keepMissing adds to what was found the GPUs that were known and do not answer now. A GPU that is lost has to stay in the ResourceSlices, or
// its taint would be gone with it and the pods that have it would never be moved. One that was taken out, without anybody holding it, is
// not kept.
func keepMissing(found *discovery.Node, known []discovery.GPU, held func(gpu string) bool) {
	nameless := slices.ContainsFunc(found.Failures, func(f discovery.Failure) bool { return f.UUID == "" && f.PCIBusID == "" })
	for _, gpu := range known {
		if slices.ContainsFunc(found.GPUs, func(g discovery.GPU) bool { return g.Name == gpu.Name }) {
			continue
		}
		failed := slices.ContainsFunc(found.Failures, func(f discovery.Failure) bool {
			return f.UUID != "" && f.UUID == gpu.UUID || f.PCIBusID != "" && f.PCIBusID == gpu.PCIBusID
		})
		if failed || nameless || held(gpu.Name) {
			found.GPUs = append(found.GPUs, gpu)
		}
	}
	slices.SortFunc(found.GPUs, func(a, b discovery.GPU) int { return strings.Compare(a.PCIBusID, b.PCIBusID) })
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

// gpusOnBus lists NVIDIA's GPUs that the kernel sees, with their drivers: a session sees a GPU that the NVIDIA driver had when it was opened.
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
}

const knownVersion = 1

func (h *Hardware) knownPath() string { return filepath.Join(h.opts.StateDir, "gpus.json") }

func (h *Hardware) healthDir() string {
	if h.opts.StateDir == "" {
		return ""
	}
	return filepath.Join(h.opts.StateDir, "health")
}

// loadKnown reads what an earlier agent knew. Without it a GPU that was lost before is not published.
func (h *Hardware) loadKnown(ctx context.Context) []discovery.GPU {
	if h.opts.StateDir == "" {
		return nil
	}
	data, err := durable.OS{}.ReadFile(h.knownPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var file knownFile
	if err == nil {
		err = json.Unmarshal(data, &file)
	}
	if err == nil && file.Version != knownVersion {
		err = errors.New("it is of another version")
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs of an earlier agent are not known", "path", h.knownPath())
		return nil
	}
	for i := range file.GPUs {
		file.GPUs[i].MIG = file.MIG[file.GPUs[i].Name]
	}
	return file.GPUs
}

// saveKnown keeps what is known for the next agent, if this is the one that does.
func (h *Hardware) saveKnown(ctx context.Context) {
	// Held from before it is read what is known, so that the newest is written last.
	h.saving.Lock()
	defer h.saving.Unlock()
	h.mu.Lock()
	gpus, lead := h.known, h.lead
	h.mu.Unlock()
	if !lead || gpus == nil || h.opts.StateDir == "" {
		return
	}
	file := knownFile{Version: knownVersion, GPUs: gpus, MIG: map[string]*discovery.MIG{}}
	for i := range gpus {
		if gpus[i].MIG != nil {
			file.MIG[gpus[i].Name] = gpus[i].MIG
		}
	}
	data, err := json.MarshalIndent(file, "", "  ")
	if err == nil {
		var was []byte
		if was, _ = (durable.OS{}).ReadFile(h.knownPath()); string(was) == string(data) {
			return
		}
		err = durable.WriteFile(durable.OS{}, h.knownPath(), data, 0o600)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs cannot be remembered for the next agent", "path", h.knownPath())
	}
}

// Lead makes this agent the one that keeps the state of GPUs in StateDir.
func (h *Hardware) Lead(ctx context.Context) {
	h.mu.Lock()
	h.lead, h.leadSince = true, h.opts.Clock.Now()
	h.mu.Unlock()
	h.saveKnown(ctx)
	h.monitor.Lead(ctx)
}

// Follow is Lead's reverse. When it returns this agent writes nothing there, and will not: another one may.
func (h *Hardware) Follow() {
	h.saving.Lock()
	defer h.saving.Unlock()
	h.mu.Lock()
	h.lead = false
	h.mu.Unlock()
	h.monitor.Follow()
}

package prepare

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// A GPU that is offered in shares (consumable capacity, KEP-5075) is held by several claims at once. Each of them keeps
// in its own record what it takes of the GPU, and all that has been done to the GPU for them together. What is shared is
// done by the first of them, found done by the others, and undone by the last.

// shareOf reads what an allocation result takes of a GPU that several claims can have; nil for one that is its claim's alone.
func (w *wanted) shareOf(driver string, target *Target, settings config.Settings) (*ledger.Share, error) {
	if w.result.ShareID == nil || w.adminAccess {
		return nil, nil
	}
	if *w.result.ShareID == "" || ledger.ValidateUID(*w.result.ShareID) != nil {
		return nil, fmt.Errorf("shareID %q: want a UID", *w.result.ShareID)
	}
	if target.Partition != nil {
		return nil, fmt.Errorf("shareID %s: a MIG device cannot be shared by several claims", *w.result.ShareID)
	}
	memory, err := w.consumed(driver, discovery.CapacityMemory, int64(target.MemoryBytes))
	if err != nil {
		return nil, err
	}
	compute, err := w.consumed(driver, discovery.CapacityCompute, 0)
	if err != nil {
		return nil, err
	}
	return &ledger.Share{MemoryBytes: memory, ComputePercent: int(compute), Setup: settings.Setup()}, nil
}

// consumed is the amount of a capacity that the result takes. The name may have the driver's domain before it.
func (w *wanted) consumed(driver string, name resourceapi.QualifiedName, none int64) (int64, error) {
	quantity, ok := w.result.ConsumedCapacity[name]
	if !ok {
		quantity, ok = w.result.ConsumedCapacity[resourceapi.QualifiedName(driver)+"/"+name]
	}
	if !ok {
		return none, nil
	}
	if err := amount.Check(quantity); err != nil {
		return 0, fmt.Errorf("consumedCapacity[%s]: %w", name, err)
	}
	n, exact := quantity.AsInt64()
	if !exact || n < 0 {
		return 0, fmt.Errorf("consumedCapacity[%s]: %s: want a whole number that is not negative", name, quantity.String())
	}
	return n, nil
}

// ShareError says that a share of a GPU cannot be given beside those that other claims have. That does not pass before
// one of them goes.
type ShareError struct {
	Claim           ledger.Claim
	Request, Device string
	// Setup is what the others have set the GPU up as, if that is the reason, and Wants how the node shares its GPUs by now.
	Setup, Wants string
	// Apart is the node if the reason is that there one namespace alone has shares of a GPU.
	Apart string
	// Capacity is what there is not enough of, otherwise: Total is all that the GPU has, and Taken what would be.
	Capacity     resourceapi.QualifiedName
	Taken, Total string
	// Others have shares of the GPU.
	Others []ledger.Claim
	// Use is what is known of those who use the share of one of them, which is Holder.
	Holder ledger.Claim
	Use    Use
}

func (e *ShareError) holders() []types.UID {
	uids := make([]types.UID, len(e.Others))
	for i, other := range e.Others {
		uids[i] = other.UID
	}
	return uids
}

func (e *ShareError) note(holder ledger.Claim, use Use) { e.Holder, e.Use = holder, use }

func (e *ShareError) Error() string {
	what := fmt.Sprintf("claim %s, request %s: device %s", e.Claim, e.Request, e.Device)
	others := named(e.Claim, e.Others...)
	if e.Use.Ends {
		others += fmt.Sprintf("; it waits for %s, %s", named(e.Claim, e.Holder), e.Use.toldTo(e.Claim, e.Holder))
	}
	if e.Capacity != "" {
		return fmt.Sprintf("%s: its share is more than is left: %s of the %s %s would be taken, with the shares that are held on this node by %s", what, e.Taken, e.Total, e.Capacity, cmp.Or(others, "nobody else"))
	}
	if e.Apart != "" {
		return fmt.Sprintf("%s: node %s gives shares of a GPU to one namespace alone (it is run without %s), and %s has one", what, e.Apart, config.AcrossNamespacesFlag, others)
	}
	return fmt.Sprintf("%s: the node shares its GPUs by %s, and this one is still shared by %s, by %s", what, e.Wants, e.Setup, others)
}

// checkShare refuses a share that does not go with those of the others. The caller has the GPU's lock.
func (m *Manager) checkShare(j *job, i int, holders []*ledger.Record) error {
	device, total := &j.entry.Devices[i], int64(j.targets[i].MemoryBytes)
	refused := &ShareError{Claim: j.entry.Claim, Request: device.Request, Device: device.Device}
	var memory, compute int64
	add := func(entry *ledger.Entry) {
		for _, d := range entry.Devices {
			if d.GPU == device.GPU && d.Share != nil {
				memory += d.Share.MemoryBytes
				compute += int64(d.Share.ComputePercent)
			}
		}
	}
	add(j.entry)
	for _, holder := range holders {
		if holder.UID == j.entry.Claim.UID || holder.Entry == nil {
			continue
		}
		if !m.opts.Sharing.AcrossNamespaces && !j.prepared && holder.Entry.Claim.Namespace != j.entry.Claim.Namespace && hasShare(holder.Entry, device.GPU) {
			refused.Apart, refused.Others = m.opts.Pool, []ledger.Claim{holder.Entry.Claim}
			return refused
		}
		for _, d := range holder.Entry.Devices {
			if d.GPU == device.GPU && d.Share != nil && d.Share.Setup != device.Share.Setup {
				refused.Setup, refused.Wants = d.Share.Setup, device.Share.Setup
				refused.Others = []ledger.Claim{holder.Entry.Claim}
				return refused
			}
		}
		add(holder.Entry)
		refused.Others = append(refused.Others, holder.Entry.Claim)
	}
	switch {
	case memory > total:
		refused.Capacity, refused.Taken, refused.Total = discovery.CapacityMemory, bytes(memory), bytes(total)
	case compute > discovery.AllCompute:
		refused.Capacity, refused.Taken, refused.Total = discovery.CapacityCompute, percent(compute), percent(discovery.AllCompute)
	default:
		return nil
	}
	return refused
}

// sharedBy is the strategy that shares of a device are used with: a prepared claim keeps what it has, whatever the node's rules are by now.
func (m *Manager) sharedBy(before *ledger.Entry, want *wanted) config.Strategy {
	if before == nil {
		return m.opts.Sharing.Shares
	}
	i := slices.IndexFunc(before.Devices, func(d ledger.Device) bool {
		return d.Share != nil && d.Request == want.request && d.Device == want.device
	})
	switch {
	case i < 0:
		return m.opts.Sharing.Shares
	case before.Devices[i].Share.Setup == string(config.MPS):
		return config.MPS
	}
	return config.TimeSlicing
}

func bytes(n int64) string   { return resource.NewQuantity(n, resource.BinarySI).String() }
func percent(n int64) string { return strconv.FormatInt(n, 10) + "%" }

// sharers are the other claims with a share of the GPU that are set up since the boot, unreadable ones among them. The
// caller has the GPU's lock.
func (m *Manager) sharers(gpu string, but types.UID, bootID string) ([]*ledger.Record, error) {
	holders, err := m.ledger.Holders(gpu)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(holders, func(r *ledger.Record) bool {
		return r.UID == but || r.Entry != nil && (bootID != "" && r.Entry.BootID != bootID || !hasShare(r.Entry, gpu))
	}), nil
}

func hasShare(entry *ledger.Entry, gpu string) bool {
	return slices.ContainsFunc(entry.Devices, func(d ledger.Device) bool { return d.GPU == gpu && d.Share != nil })
}

// keptByOthers tells whether what was done to the GPU for all that have a share of it has to stay. Not knowing is yes:
// pods may run.
func (m *Manager) keptByOthers(entry *ledger.Entry, gpu string) (bool, error) {
	bootID, err := m.opts.Hardware.BootID()
	if err != nil {
		bootID = ""
	}
	others, err := m.sharers(gpu, entry.Claim.UID, bootID)
	return len(others) > 0, err
}

// shareSteps bring a GPU to the state that its sharers have agreed on: what has been done for others already, and what is
// missing.
func (m *Manager) shareSteps(j *job, gpu string, settings config.Settings, now *observed) ([]ledger.Step, error) {
	steps, err := wholeSteps(settings, now)
	if err != nil {
		return nil, err
	}
	others, err := m.sharers(gpu, j.entry.Claim.UID, j.entry.BootID)
	if err != nil {
		return nil, err
	}
	for i := range steps {
		steps[i].Shared = steps[i].Kind != ledger.StepProcesses
	}
	for _, other := range others {
		if other.Entry == nil {
			continue
		}
		for _, theirs := range other.Entry.Undo {
			if theirs.GPU != gpu || !slices.Contains(setupOrder, theirs.Kind) {
				continue
			}
			// How the GPU was before, the first of them knows.
			if i := slices.IndexFunc(steps, func(s ledger.Step) bool { return s.Kind == theirs.Kind }); i >= 0 {
				steps[i].Before = theirs.Before
			} else {
				steps = append(steps, theirs)
			}
		}
		break
	}
	slices.SortStableFunc(steps, func(a, b ledger.Step) int {
		return slices.Index(setupOrder, a.Kind) - slices.Index(setupOrder, b.Kind)
	})
	return steps, nil
}

// setupOrder has the steps on a GPU that is used as a whole.
var setupOrder = []ledger.StepKind{ledger.StepPersistence, ledger.StepComputeMode, ledger.StepTimeSlice, ledger.StepProcesses}

// granted is what the containers of a request may use of one GPU, by all the shares that the request has of it.
type granted struct {
	memoryMiB int64
	// percent is 0 for no limit.
	percent int
}

func (j *job) granted(request, gpu string) (g granted) {
	limited := true
	for _, d := range j.entry.Devices {
		if d.Share != nil && d.Request == request && d.GPU == gpu {
			g.memoryMiB += d.Share.MemoryBytes >> 20
			g.percent += d.Share.ComputePercent
			limited = limited && d.Share.ComputePercent > 0
		}
	}
	if !limited {
		g.percent = 0
	}
	return g
}

// Names of variables that the MPS server reads from its clients' environments (NVIDIA's documentation of the Multi-Process
// Service, "Environment Variables").
const (
	mpsMemoryEnv  = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	mpsPercentEnv = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// shareEdits tell a container what it may use, and, under MPS, hold each of its processes to it.
func (m *Manager) shareEdits(j *job, i int) (*specs.ContainerEdits, error) {
	device, settings := &j.entry.Devices[i], j.settings[i]
	allowed := j.granted(device.Request, device.GPU)
	edits := &specs.ContainerEdits{Env: cdi.ShareEnv(device.Device, allowed.memoryMiB, allowed.percent)}
	if settings.Strategy != config.MPS {
		return edits, nil
	}
	limit, err := mpsLimit(settings.MPS, device, allowed)
	if err != nil {
		return nil, fmt.Errorf("claim %s, request %s: %w", j.entry.Claim, device.Request, err)
	}
	daemon := m.opts.Tools.Daemons.Edits(device.GPU)
	edits.Env, edits.Mounts = append(edits.Env, daemon.Env...), daemon.Mounts
	// The daemon serves this GPU alone, so it is its clients' number 0.
	edits.Env = append(edits.Env, fmt.Sprintf("%s=0=%dM", mpsMemoryEnv, limit.memoryMiB))
	if limit.percent > 0 {
		edits.Env = append(edits.Env, fmt.Sprintf("%s=%d", mpsPercentEnv, limit.percent))
	}
	return edits, nil
}

// mpsLimit is for each process of the share: all of the share, or less if the parameters say so.
func mpsLimit(limits *config.Limits, device *ledger.Device, allowed granted) (granted, error) {
	memory, err := limits.MemoryOf([]string{device.UUID})
	if err != nil {
		return granted{}, err
	}
	switch {
	case memory[0] > allowed.memoryMiB:
		return granted{}, fmt.Errorf("sharing.mpsConfig: a limit of %dMi for a process is more than the share of the GPU has, %dMi", memory[0], allowed.memoryMiB)
	case allowed.percent > 0 && limits.ActiveThreadPercentage > allowed.percent:
		return granted{}, fmt.Errorf("sharing.mpsConfig.defaultActiveThreadPercentage: %d is more than the share of the GPU has, %d", limits.ActiveThreadPercentage, allowed.percent)
	}
	return granted{memoryMiB: cmp.Or(memory[0], allowed.memoryMiB), percent: cmp.Or(limits.ActiveThreadPercentage, allowed.percent)}, nil
}

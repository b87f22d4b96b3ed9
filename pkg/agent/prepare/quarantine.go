package prepare

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// Quarantine is a GPU on which something of a claim is left that could not be undone: the GPU is lost, does not
// answer, or a process does not end. The claim is unprepared all the same, since its pod cannot go otherwise;
// nobody gets the GPU until what is owed has been done, or a reboot has made it unnecessary.
type Quarantine struct {
	// GPU is the physical GPU's name.
	GPU string `json:"gpu"`
	// Owed has the claim, the boot, and in Undo the steps on this GPU that are still to be undone.
	Owed   *ledger.Entry `json:"owed"`
	Reason string        `json:"reason"`
	Since  time.Time     `json:"since"`

	path string
}

// Holder is the claim that the GPU is in quarantine for, "" if that cannot be read any more.
func (q *Quarantine) Holder() types.UID {
	if q.Owed == nil {
		return ""
	}
	return q.Owed.Claim.UID
}

// QuarantinedError says that a GPU is nobody's, and why.
type QuarantinedError struct {
	GPU    string
	Reason string
	Since  time.Time
	// Owed is the claim that it is in quarantine for, if that is known, and Claim the one that is refused because of it, if one is. Only
	// where both are of one namespace does the text say what it is in quarantine for: reasons name pods and processes.
	Owed, Claim ledger.Claim
	// Err is why it was not released just now.
	Err error
}

func (e *QuarantinedError) Error() string {
	if e.Claim.UID != "" && e.Claim.Namespace != e.Owed.Namespace {
		return fmt.Sprintf("GPU %s is in quarantine since %s: what an earlier claim did to it is not undone; node-agent ledger show says more, on the node", e.GPU, e.Since.Format(time.RFC3339))
	}
	return e.inFull()
}

// inFull is for the node's log and its administrators.
func (e *QuarantinedError) inFull() string {
	return fmt.Sprintf("GPU %s is in quarantine since %s (%s): %v", e.GPU, e.Since.Format(time.RFC3339), e.Reason, e.Err)
}

func (e *QuarantinedError) Unwrap() error { return e.Err }

const (
	quarantineFolder = "quarantine"
	// QuarantineSuffix ends the names of the files in QuarantineDir.
	QuarantineSuffix = ".quarantine"
)

// Quarantined lists the GPUs in quarantine, by name; one may be listed for several claims.
func (m *Manager) Quarantined() ([]Quarantine, error) { return m.quarantined("") }

func (m *Manager) quarantined(gpu string) ([]Quarantine, error) {
	entries, err := m.opts.FS.ReadDir(m.quarantineDir())
	if err != nil {
		return nil, fmt.Errorf("read quarantine folder: %w", err)
	}
	var all []Quarantine
	for _, file := range entries {
		name, ok := strings.CutSuffix(file.Name(), QuarantineSuffix)
		if !ok {
			continue
		}
		of, _, _ := strings.Cut(name, "_")
		if gpu != "" && of != gpu {
			continue
		}
		all = append(all, m.readQuarantine(filepath.Join(m.quarantineDir(), file.Name()), of))
	}
	return all, nil
}

// readQuarantine makes of a file that cannot be read a quarantine without end: the name tells the GPU.
func (m *Manager) readQuarantine(path, gpu string) Quarantine {
	data, err := m.opts.FS.ReadFile(path)
	q := Quarantine{}
	if err == nil {
		err = json.Unmarshal(data, &q)
	}
	if err == nil && (q.GPU != gpu || q.Owed == nil) {
		err = fmt.Errorf("it is about GPU %q", q.GPU)
	}
	if err != nil {
		q = Quarantine{GPU: gpu, Reason: fmt.Sprintf("the file %s cannot be read: %v; node-agent ledger release frees the GPU once nothing uses it", path, durable.Reason(err))}
	}
	q.path = path
	return q
}

// InQuarantine tells whether an agent with that state folder has the GPU in quarantine. A folder that cannot be read has none.
func InQuarantine(stateDir, gpu string) bool {
	files, err := filepath.Glob(filepath.Join(QuarantineDir(stateDir), gpu+"_*"+QuarantineSuffix))
	return err == nil && len(files) > 0
}

// QuarantineDir has a file for each GPU in quarantine and claim that it is in it for.
func QuarantineDir(stateDir string) string { return filepath.Join(stateDir, quarantineFolder) }

func (m *Manager) quarantineDir() string { return QuarantineDir(m.opts.StateDir) }

func (m *Manager) quarantinePath(gpu string, entry *ledger.Entry) string {
	return filepath.Join(m.quarantineDir(), gpu+"_"+string(entry.Claim.UID)+QuarantineSuffix)
}

// debt is what could not be undone on one GPU, the steps in the order in which they were done.
type debt struct {
	gpu   string
	steps []ledger.Step
	err   error
}

// owe adds a step, of those of the GPU the first.
func owe(debts []debt, gpu string, step ledger.Step, err error) []debt {
	step.GPU = gpu
	i := slices.IndexFunc(debts, func(d debt) bool { return d.gpu == gpu })
	if i < 0 {
		return append(debts, debt{gpu: gpu, steps: []ledger.Step{step}, err: err})
	}
	debts[i].steps = slices.Insert(debts[i].steps, 0, step)
	return debts
}

// keepDebts records what is owed for each GPU of the claim.
func (m *Manager) keepDebts(ctx context.Context, entry *ledger.Entry, debts []debt) error {
	for _, d := range debts {
		owed := *entry
		owed.Undo, owed.CDISpec, owed.Devices = d.steps, nil, nil
		q := Quarantine{GPU: d.gpu, Owed: &owed, Reason: clipped(d.err.Error()), Since: m.opts.Clock.Now().UTC()}
		data, err := json.Marshal(q)
		if err != nil {
			return fmt.Errorf("encode quarantine of GPU %s: %w", d.gpu, err)
		}
		if err := durable.WriteFile(m.opts.FS, m.quarantinePath(d.gpu, entry), data, 0o600); err != nil {
			return fmt.Errorf("put GPU %s into quarantine: %w", d.gpu, err)
		}
		klog.FromContext(ctx).Error(d.err, "GPU is in quarantine: what a claim did to it could not be undone", "device", d.gpu, "claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name), "steps", len(d.steps))
	}
	return nil
}

// maxReason of an error is kept. Errors have paths and output of programs in them, which may be long.
const maxReason = 1024

func clipped(text string) string {
	if len(text) > maxReason {
		text = text[:maxReason] + "…"
	}
	return strings.ToValidUTF8(text, "")
}

// owes tells whether one of the claim's GPUs is in quarantine for the claim itself.
func (m *Manager) owes(entry *ledger.Entry) (bool, error) {
	list, err := m.quarantined("")
	if err != nil {
		return false, err
	}
	held := entry.HeldGPUs()
	return slices.ContainsFunc(list, func(q Quarantine) bool { return q.Holder() == entry.Claim.UID && slices.Contains(held, q.GPU) }), nil
}

// settle tries to do what is owed on a GPU, and takes it out of quarantine if that succeeds. The caller has the GPU's lock.
// The error is a *QuarantinedError if the GPU stays where it is.
func (m *Manager) settle(ctx context.Context, gpu string) error {
	list, err := m.quarantined(gpu)
	if err != nil {
		return err
	}
	for _, q := range list {
		if q.Owed == nil {
			return &QuarantinedError{GPU: gpu, Reason: q.Reason, Since: q.Since, Err: errors.New("what is to be undone is not known")}
		}
		for _, step := range slices.Backward(q.Owed.Undo) {
			if err := m.undo(ctx, q.Owed, step); err != nil {
				return &QuarantinedError{GPU: gpu, Reason: q.Reason, Since: q.Since, Owed: q.Owed.Claim, Err: fmt.Errorf("undo %s: %w", step, err)}
			}
		}
		if err := m.release(q.path); err != nil {
			return fmt.Errorf("release GPU %s from quarantine: %w", gpu, err)
		}
		klog.FromContext(ctx).Info("GPU is out of quarantine: what was owed is done", "device", gpu, "claim", klog.KRef(q.Owed.Claim.Namespace, q.Owed.Claim.Name))
	}
	return nil
}

func (m *Manager) release(path string) error {
	if err := durable.Remove(m.opts.FS, path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// settleAll is settle for every GPU in quarantine. Those that stay are no error; who publishes them says why.
func (m *Manager) settleAll(ctx context.Context) (left int, err error) {
	list, err := m.quarantined("")
	if err != nil {
		return 0, err
	}
	gpus := map[string]bool{}
	for _, q := range list {
		gpus[q.GPU] = true
	}
	// One that hangs does not keep the others where they are.
	var (
		group sync.WaitGroup
		mu    sync.Mutex
		errs  []error
	)
	for gpu := range gpus {
		group.Go(func() {
			err := m.settleOne(ctx, gpu)
			mu.Lock()
			defer mu.Unlock()
			var stays *QuarantinedError
			if errors.As(err, &stays) {
				left++
			} else if err != nil {
				errs = append(errs, err)
			}
		})
	}
	group.Wait()
	return left, errors.Join(errs...)
}

func (m *Manager) settleOne(ctx context.Context, gpu string) error {
	locks := m.locks.begin()
	defer locks.unlock()
	if err := locks.gpus(ctx, gpu); err != nil {
		return fmt.Errorf("release GPU %s from quarantine: %w", gpu, err)
	}
	return m.settle(ctx, gpu)
}

// Made is what the agent has made on GPUs since the last boot: what a claim, or a GPU in quarantine, has a step for that takes it
// back. What cannot be read is left out.
func (m *Manager) Made() discovery.Made {
	made := discovery.Made{}
	bootID, err := m.opts.Hardware.BootID()
	if err != nil {
		return made
	}
	var entries []*ledger.Entry
	// In this order: what goes over from the ledger into quarantine is in one of them.
	if records, err := m.ledger.Records(); err == nil {
		for _, record := range records {
			entries = append(entries, record.Entry)
		}
	}
	if list, err := m.quarantined(""); err == nil {
		for _, q := range list {
			entries = append(entries, q.Owed)
		}
	}
	for _, entry := range entries {
		if entry == nil || entry.BootID != bootID {
			continue
		}
		for _, step := range entry.Undo {
			switch step.Kind {
			case ledger.StepMIGMode:
				made.Insert(discovery.Place{GPU: step.GPU})
			case ledger.StepPartition:
				made.Insert(discovery.Place{GPU: step.GPU, At: nvml.Placement{Start: step.Partition.Start, Size: step.Partition.Size}})
			}
		}
	}
	return made
}

// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Quarantine is a GPU on which something of a claim is left that could not be undone: the GPU is lost, does not
// answer, or a process does not end. The claim is unprepared all the same, since its pod cannot go otherwise;
// nobody gets the GPU, or its partitions that are concerned, until what is owed has been done, or a reboot has made it unnecessary.
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

// Places are the partitions that are concerned, nil if all of the GPU is. MIG mode that is still to be switched off concerns none: who has
// one goes on with it, and it is off again after the last. With nothing else there is a place of
// size 0, which the whole GPU alone overlaps.
func (q *Quarantine) Places() (places []*ledger.Partition) {
	if q.Owed == nil {
		return nil
	}
	for _, step := range q.Owed.Undo {
		switch {
		case step.Partition == nil && step.Kind != ledger.StepMIGMode:
			return nil
		case step.Partition != nil && !slices.ContainsFunc(places, func(p *ledger.Partition) bool { return *p == *step.Partition }):
			places = append(places, step.Partition)
		}
	}
	if places == nil {
		places = append(places, &ledger.Partition{})
	}
	return places
}

// is tells whether the other one is this one, read anew.
func (q *Quarantine) is(other *Quarantine) bool { return q.path == other.path }

// keepsOff tells whether the claim has to wait: it has what is in quarantine.
func (q *Quarantine) keepsOff(entry *ledger.Entry) bool {
	places := q.Places()
	return slices.ContainsFunc(entry.Devices, func(d ledger.Device) bool {
		return !d.AdminAccess && d.GPU == q.GPU &&
			(places == nil || slices.ContainsFunc(places, func(p *ledger.Partition) bool { return p.Overlaps(d.Partition) }))
	})
}

// waitsFor tells whether a step is to be undone after one of these, which cannot be. Steps on other partitions do not wait.
func waitsFor(step ledger.Step, owed []ledger.Step) bool {
	return slices.ContainsFunc(owed, func(o ledger.Step) bool { return o.Partition.Overlaps(step.Partition) })
}

// claim is whose quarantine it is, by the file's name: the content may not be readable.
func (q *Quarantine) claim() types.UID {
	_, uid, _ := strings.Cut(strings.TrimSuffix(filepath.Base(q.path), QuarantineSuffix), "_")
	return types.UID(uid)
}

const (
	quarantineFolder = "quarantine"
	// QuarantineSuffix ends the names of the files in QuarantineDir.
	QuarantineSuffix = ".quarantine"
)

// quarantines is the folder with a file for each GPU in quarantine and claim that it is in it for.
type quarantines struct {
	fs  durable.FS
	dir string
}

// list returns those of a GPU, or of all if it is empty, by name.
func (qs quarantines) list(gpu string) ([]Quarantine, error) {
	entries, err := qs.fs.ReadDir(qs.dir)
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
		all = append(all, qs.read(filepath.Join(qs.dir, file.Name()), of))
	}
	return all, nil
}

// read makes of a file that cannot be read a quarantine without end: the name tells the GPU.
func (qs quarantines) read(path, gpu string) Quarantine {
	data, err := qs.fs.ReadFile(path)
	q := Quarantine{}
	if err == nil {
		err = json.Unmarshal(data, &q)
	}
	if err == nil && (q.GPU != gpu || q.Owed == nil) {
		err = fmt.Errorf("it is about GPU %q", q.GPU)
	}
	if err != nil {
		q = Quarantine{
			GPU: gpu,
			Reason: fmt.Sprintf("the file %s cannot be read: %v; node-agent ledger release frees the GPU once nothing uses it",
				path, durable.Reason(err)),
		}
	}
	q.path = path
	return q
}

// InQuarantine tells whether an agent with that state folder has the GPU in quarantine. A folder that cannot be read has none.
func InQuarantine(stateDir, gpu string) bool {
	files, _ := filepath.Glob(filepath.Join(QuarantineDir(stateDir), gpu+"_*"+QuarantineSuffix)) // the pattern is a good one
	return len(files) > 0
}

// QuarantineDir has a file for each GPU in quarantine and claim that it is in it for.
func QuarantineDir(stateDir string) string { return filepath.Join(stateDir, quarantineFolder) }

func (qs quarantines) path(gpu string, entry *ledger.Entry) string {
	return filepath.Join(qs.dir, gpu+"_"+string(entry.Claim.UID)+QuarantineSuffix)
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

// keep records what is owed for each GPU of the claim, beside what is still owed on it since the claim had other partitions.
func (qs quarantines) keep(ctx context.Context, entry *ledger.Entry, debts []debt, now time.Time) error {
	for _, d := range debts {
		owed := *entry
		owed.Undo, owed.CDISpec, owed.Devices = d.steps, nil, nil
		q := &Quarantine{GPU: d.gpu, Owed: &owed, Reason: clipped(d.err.Error()), Since: now.UTC(), path: qs.path(d.gpu, entry)}
		err := qs.addEarlier(q)
		if err == nil {
			err = qs.write(q)
		}
		if err != nil {
			return fmt.Errorf("put GPU %s into quarantine: %w", d.gpu, err)
		}
		klog.FromContext(ctx).Error(d.err, "GPU is in quarantine: what a claim did to it could not be undone", "device", d.gpu,
			"claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name), "steps", len(d.steps))
	}
	return nil
}

// addEarlier adds what the file has that is to be written over, if that is of the same boot.
func (qs quarantines) addEarlier(q *Quarantine) error {
	list, err := qs.list(q.GPU)
	i := slices.IndexFunc(list, func(earlier Quarantine) bool { return q.is(&earlier) })
	if err != nil || i < 0 || list[i].Owed == nil || list[i].Owed.BootID != q.Owed.BootID {
		return err
	}
	earlier := list[i].Owed
	steps := slices.Clone(earlier.Undo)
	for _, step := range q.Owed.Undo {
		if !slices.ContainsFunc(steps, func(s ledger.Step) bool { return reflect.DeepEqual(s, step) }) {
			steps = append(steps, step)
		}
	}
	q.Owed.Undo, q.Owed.Pods = steps, remembered(earlier.Pods, q.Owed.Pods)
	return nil
}

func (qs quarantines) write(q *Quarantine) error {
	data, err := json.Marshal(q)
	if err != nil {
		return fmt.Errorf("encode quarantine of GPU %s: %w", q.GPU, err)
	}
	return durable.WriteFile(qs.fs, q.path, data, 0o600)
}

// maxReason of an error is kept. Errors have paths and output of programs in them, which may be long.
const maxReason = 1024

func clipped(text string) string {
	if len(text) > maxReason {
		text = text[:maxReason] + "…"
	}
	return strings.ToValidUTF8(text, "")
}

// owes tells whether what the claim has is in quarantine for the claim itself.
func (qs quarantines) owes(entry *ledger.Entry) (bool, error) {
	list, err := qs.list("")
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(list, func(q Quarantine) bool { return q.Holder() == entry.Claim.UID && q.keepsOff(entry) }), nil
}

// switchedMIG tells whether MIG mode is owed for a GPU: who comes meanwhile takes it back, too, if he goes last.
func (qs quarantines) switchedMIG(gpu, bootID string) (bool, error) {
	list, err := qs.list(gpu)
	return slices.ContainsFunc(list, func(q Quarantine) bool {
		return q.Owed != nil && q.Owed.BootID == bootID &&
			slices.ContainsFunc(q.Owed.Undo, func(s ledger.Step) bool { return s.Kind == ledger.StepMIGMode })
	}), err
}

func (qs quarantines) remove(path string) error {
	return durable.Remove(qs.fs, path)
}

// unfinished has the paths by claim.
func (qs quarantines) unfinished() (map[types.UID][]string, error) {
	entries, err := qs.fs.ReadDir(qs.dir)
	if err != nil {
		return nil, fmt.Errorf("read quarantine folder: %w", err)
	}
	paths := map[types.UID][]string{}
	for _, entry := range entries {
		if name, ok := strings.CutSuffix(entry.Name(), QuarantineSuffix+durable.TempSuffix); ok {
			_, claim, _ := strings.Cut(name, "_")
			paths[types.UID(claim)] = append(paths[types.UID(claim)], filepath.Join(qs.dir, entry.Name()))
		}
	}
	return paths, nil
}

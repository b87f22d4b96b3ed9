// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// golden are records as agents of each schema version wrote them. They are never changed: nodes have such files.
var golden = map[string]*ledger.Entry{
	"v1-whole-gpu.claim": {
		Claim: ledger.Claim{UID: uid, Namespace: "default", Name: "train"},
		State: ledger.PrepareCompleted,
		Devices: []ledger.Device{
			{Request: "gpu", Pool: "node-1", Device: gpu0, GPU: gpu0, UUID: "GPU-1", CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=a"}},
			{
				Request: "watch/any", Pool: "node-1", Device: "gpu-0000-43-00-0", GPU: "gpu-0000-43-00-0", UUID: "GPU-2", AdminAccess: true,
				ShareID: ptr.To[types.UID]("7b6b5d2e-0000-4000-8000-00000000000a"), CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=b"},
			},
		},
		Updated: time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC),
		Undo:    []ledger.Step{{Kind: ledger.StepCDIFile, Target: "/var/run/cdi/k8s.gpu.nvidia.com-claim_x.json"}},
		CDISpec: json.RawMessage(`{"cdiVersion":"0.5.0","kind":"k8s.gpu.nvidia.com/claim"}`),
	},
	"v2-partition.claim": {
		Claim: ledger.Claim{UID: uid, Namespace: "default", Name: "train"},
		State: ledger.PrepareStarted,
		Devices: []ledger.Device{{
			Request: "mig", Pool: "node-1", Device: gpu0 + "-mig-1g10gb-6", GPU: gpu0, UUID: "MIG-1", GPUUUID: "GPU-1",
			Partition: &place, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=a"},
		}},
		Updated: time.Date(2026, 11, 22, 2, 0, 0, 0, time.UTC),
		BootID:  "b1",
		Pods:    []types.UID{"7b6b5d2e-0000-4000-8000-00000000000b"},
		Undo: []ledger.Step{
			{Kind: ledger.StepMIGMode, Target: "GPU-1", GPU: gpu0},
			{Kind: ledger.StepPartition, Target: "GPU-1", GPU: gpu0, Partition: &place},
			{Kind: ledger.StepComputeMode, Target: "GPU-1", GPU: gpu0, Before: "Default", Want: "Exclusive_Process"},
			{Kind: ledger.StepCDIFile, Target: "/var/run/cdi/k8s.gpu.nvidia.com-claim_x.json"},
		},
		CDISpec: json.RawMessage(`{"cdiVersion":"0.5.0","kind":"k8s.gpu.nvidia.com/claim"}`),
	},
	"v3-share.claim": {
		Claim: ledger.Claim{UID: uid, Namespace: "default", Name: "serve"},
		State: ledger.PrepareCompleted,
		Devices: []ledger.Device{{
			Request: "gpu", Pool: "node-1", Device: gpu0, GPU: gpu0, UUID: "GPU-1",
			Share:   &ledger.Share{MemoryBytes: 20 << 30, ComputePercent: 25, Setup: "MPS"},
			ShareID: ptr.To[types.UID]("7b6b5d2e-0000-4000-8000-00000000000a"), CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=a"},
		}},
		Updated: time.Date(2026, 11, 22, 5, 0, 0, 0, time.UTC),
		BootID:  "b1",
		Pods:    []types.UID{"7b6b5d2e-0000-4000-8000-00000000000b"},
		Undo: []ledger.Step{
			{Kind: ledger.StepComputeMode, Target: "GPU-1", GPU: gpu0, Before: "Default", Want: "Exclusive_Process", Shared: true},
			{Kind: ledger.StepProcesses, Target: "GPU-1", GPU: gpu0, Before: "629145600"},
			{Kind: ledger.StepMPSDaemon, Target: gpu0, GPU: gpu0, Shared: true},
			{Kind: ledger.StepCDIFile, Target: "/var/run/cdi/k8s.gpu.nvidia.com-claim_x.json"},
		},
		CDISpec: json.RawMessage(`{"cdiVersion":"0.5.0","kind":"k8s.gpu.nvidia.com/claim"}`),
	},
	"v5-device-plugin.claim": {
		Claim: ledger.Claim{
			UID: uid, Name: "nvidia.com.gpu." + gpu0, Plugin: ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "GPU-1"},
		},
		State:   ledger.PrepareCompleted,
		Devices: []ledger.Device{{Request: "device", Pool: "node-1", Device: gpu0, GPU: gpu0, UUID: "GPU-1", CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=a"}}},
		Updated: time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC),
		BootID:  "b1",
		Pods:    []types.UID{"7b6b5d2e-0000-4000-8000-00000000000b"},
		Undo: []ledger.Step{
			{Kind: ledger.StepProcesses, Target: "GPU-1", GPU: gpu0, Before: "629145600"},
			{Kind: ledger.StepCDIFile, Target: "/var/run/cdi/k8s.gpu.nvidia.com-claim_x.json"},
		},
		CDISpec: json.RawMessage(`{"cdiVersion":"0.5.0","kind":"k8s.gpu.nvidia.com/claim"}`),
	},
	"v4-passthrough.claim": {
		Claim: ledger.Claim{UID: uid, Namespace: "default", Name: "machine"},
		State: ledger.PrepareCompleted,
		Devices: []ledger.Device{{
			Request: "vm", Pool: "node-1", Device: gpu0 + "-vfio", GPU: gpu0, UUID: "0000:1b:00.0", Passthrough: true,
			CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=a"},
		}},
		Updated: time.Date(2026, 11, 22, 6, 30, 0, 0, time.UTC),
		BootID:  "b1",
		Pods:    []types.UID{"7b6b5d2e-0000-4000-8000-00000000000b"},
		Undo: []ledger.Step{
			{Kind: ledger.StepComputeMode, Target: "GPU-1", GPU: gpu0, Before: "Exclusive_Process", Want: "Default"},
			{Kind: ledger.StepNoPersistence, Target: "GPU-1", GPU: gpu0},
			{Kind: ledger.StepHidden, Target: "GPU-1", GPU: gpu0},
			{Kind: ledger.StepPCIDriver, Target: "0000:1b:00.0", GPU: gpu0, Before: "nvidia", Want: "vfio-pci"},
			{Kind: ledger.StepPCIDriver, Target: "0000:1b:00.1", GPU: gpu0, Before: "snd_hda_intel", Override: "snd_hda_intel", Want: "vfio-pci"},
			{Kind: ledger.StepIOMMUGroup, Target: "20", GPU: gpu0},
			{Kind: ledger.StepCDIFile, Target: "/var/run/cdi/k8s.gpu.nvidia.com-claim_x.json"},
		},
		CDISpec: json.RawMessage(`{"cdiVersion":"0.5.0","kind":"k8s.gpu.nvidia.com/claim"}`),
	},
	"v3-compute-instance.claim": {
		Claim: ledger.Claim{UID: uid, Namespace: "default", Name: "train"},
		State: ledger.PrepareStarted,
		Devices: []ledger.Device{{
			Request: "mig", Pool: "node-1", Device: gpu0 + "-mig-1c3g40gb-4-1", GPU: gpu0, UUID: "MIG-1", GPUUUID: "GPU-1",
			Partition: &part, CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=a"},
		}},
		Updated: time.Date(2026, 11, 22, 6, 0, 0, 0, time.UTC),
		BootID:  "b1",
		Undo: []ledger.Step{
			{Kind: ledger.StepProcesses, Target: "GPU-1", GPU: gpu0, Partition: &part},
			{Kind: ledger.StepCDIFile, Target: "/var/run/cdi/k8s.gpu.nvidia.com-claim_x.json"},
		},
	},
}

const gpu0 = "gpu-0000-1b-00-0"

var place = ledger.Partition{Profile: "1g.10gb", ProfileID: 19, Start: 6, Size: 1}

var part = ledger.Partition{Profile: "3g.40gb", ProfileID: 9, Start: 4, Size: 4, ComputeStart: 1, ComputeSize: 1}

// install puts a file of testdata where a ledger finds it.
func install(t *testing.T, name string) (l *ledger.Ledger, path string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	l = open(t, durable.OS{}, t.TempDir())
	path = filepath.Join(l.Dir(), string(uid)+"_"+gpu0+".claim")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return l, path
}

func TestRecordsOfEverySchemaVersionAreReadable(t *testing.T) {
	versions := map[string]bool{}
	for name, want := range golden {
		t.Run(name, func(t *testing.T) {
			version, _, _ := strings.Cut(name, "-")
			versions[version] = true
			l, _ := install(t, name)
			record := get(t, l)
			if record.Err != nil || record.Recovered != nil {
				t.Fatal(record.Err, record.Recovered)
			}
			if diff := cmp.Diff(want, record.Entry); diff != "" {
				t.Errorf("entry (-want +got):\n%s", diff)
			}
		})
	}
	for version := 1; version <= ledger.SchemaVersion; version++ {
		if !versions[fmt.Sprintf("v%d", version)] {
			t.Errorf("no record of schema version %d in testdata", version)
		}
	}
}

// TestNewGoldenRecordsAreWhatIsWritten: what is written changes together with the version, or not at all. A record is of
// the oldest version that says all of it, so that the agent from before an update can unprepare it.
func TestNewGoldenRecordsAreWhatIsWritten(t *testing.T) {
	for _, name := range []string{"v2-partition.claim", "v3-share.claim", "v3-compute-instance.claim", "v4-passthrough.claim", "v5-device-plugin.claim"} {
		l := open(t, durable.OS{}, t.TempDir())
		if err := l.Put(golden[name]); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(get(t, l).Path)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestMessagesNameWhatIsHeld(t *testing.T) {
	for want, claim := range map[string]ledger.Claim{
		"default/train (u1)": {UID: "u1", Namespace: "default", Name: "train"},
		"nvidia.com/gpu GPU-1 of the device plugin": {
			UID: "u1", Name: "nvidia.com.gpu." + gpu0, Plugin: ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: "GPU-1"},
		},
	} {
		if got := claim.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestAnOlderAgentDoesNotTouchANewerRecord: it says so, the GPU stays held, and the file stays as it is.
func TestAnOlderAgentDoesNotTouchANewerRecord(t *testing.T) {
	l, path := install(t, "v99-newer.claim")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// A previous copy that could be read is not the truth any more.
	old, err := os.ReadFile("testdata/v1-whole-gpu.claim")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".prev", old, 0o600); err != nil {
		t.Fatal(err)
	}
	record := get(t, l)
	var newer *ledger.NewerVersionError
	if !errors.As(record.Err, &newer) || newer.Version != 99 || record.Entry != nil {
		t.Errorf("record %+v: want the version in the error, and no entry", record)
	}
	if !record.Holds(gpu0) || record.Holds("gpu-0000-43-00-0") {
		t.Errorf("holds %v, want %s alone", record.GPUs, gpu0)
	}
	if err := l.Put(entry(ledger.PrepareCompleted, gpu0)); !errors.As(err, &newer) {
		t.Errorf("overwritten: %v", err)
	}
	after, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file was changed: %v", err)
	}
}

// TestDamageNeverPassesForARecord cuts a record at every byte, and changes every byte.
func TestDamageNeverPassesForARecord(t *testing.T) {
	data, err := os.ReadFile("testdata/v2-partition.claim")
	if err != nil {
		t.Fatal(err)
	}
	want := golden["v2-partition.claim"]
	l, path := install(t, "v2-partition.claim")
	damaged := map[string][]byte{}
	for at := range data {
		damaged[fmt.Sprintf("cut at %d", at)] = data[:at]
		changed := bytes.Clone(data)
		changed[at] ^= 0x10
		damaged[fmt.Sprintf("byte %d changed", at)] = changed
	}
	for name, content := range damaged {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		record := get(t, l)
		if record == nil || !record.Holds(gpu0) {
			t.Errorf("%s: record %+v does not hold its GPU any more", name, record)
		} else if record.Err == nil && cmp.Diff(want, record.Entry) != "" {
			t.Errorf("%s: accepted with another content", name)
		}
	}
	t.Logf("%d damaged records", len(damaged))
}

func TestOverlap(t *testing.T) {
	at := func(start, size uint32) *ledger.Partition { return &ledger.Partition{Start: start, Size: size} }
	part := func(start, size, computeStart, computeSize uint32) *ledger.Partition {
		return &ledger.Partition{Start: start, Size: size, ComputeStart: computeStart, ComputeSize: computeSize}
	}
	tests := map[string]struct {
		a, b *ledger.Partition
		want bool
	}{
		"whole GPUs":                  {nil, nil, true},
		"a whole GPU and a partition": {nil, at(6, 1), true},
		"the same place":              {at(0, 4), at(0, 4), true},
		"one in the other":            {at(0, 4), at(3, 1), true},
		"side by side":                {at(0, 4), at(4, 4), false},
		"apart":                       {at(0, 1), at(6, 1), false},
		"compute slices side by side": {part(4, 4, 0, 1), part(4, 4, 1, 2), false},
		"a compute slice in others":   {part(4, 4, 0, 2), part(4, 4, 1, 1), true},
		"the same compute slices":     {part(4, 4, 1, 1), part(4, 4, 1, 1), true},
		"of one place, and all of it": {part(4, 4, 1, 1), at(4, 4), true},
		"of places that overlap":      {part(4, 4, 0, 1), part(4, 2, 1, 1), true},
		"of places that overlap, too": {part(4, 2, 0, 1), part(5, 2, 1, 1), true},
		"of places apart":             {part(0, 4, 0, 1), part(4, 4, 0, 1), false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.a.Overlaps(tc.b) != tc.want || tc.b.Overlaps(tc.a) != tc.want {
				t.Errorf("want %v both ways", tc.want)
			}
		})
	}
}

// FuzzRecord: whatever the bytes of a file, reading never panics, the GPUs in its name stay held, and what is
// accepted is read back the same after it was written again.
func FuzzRecord(f *testing.F) {
	for _, name := range []string{"v1-whole-gpu.claim", "v2-partition.claim", "v99-newer.claim"} {
		data, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"kind":"StowageClaimLedger","schemaVersion":-1}` + "\n"))
	f.Add([]byte("{}\n{}"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		l := open(t, durabletest.Unsynced{}, dir)
		path := filepath.Join(dir, string(uid)+"_"+gpu0+".claim")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := l.Remove(uid); err != nil {
				t.Error(err)
			}
		}()
		record := get(t, l)
		if record == nil || !record.Holds(gpu0) || (record.Err == nil) == (record.Entry == nil) {
			t.Fatalf("record %+v", record)
		}
		if record.Err != nil {
			return
		}
		again := record.Entry
		if err := l.Remove(uid); err != nil {
			t.Fatal(err)
		}
		if err := l.Put(again); err != nil {
			// A GPU's name is part of the file's.
			return
		}
		second := get(t, l)
		if second == nil || second.Entry == nil {
			t.Fatalf("written again: %+v", second)
		}
		a, _ := json.Marshal(again)
		b, _ := json.Marshal(second.Entry)
		if !bytes.Equal(a, b) {
			t.Errorf("written again:\n%s\nbefore:\n%s", b, a)
		}
	})
}

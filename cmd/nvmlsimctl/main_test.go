// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// ctl runs the program.
func ctl(t *testing.T, socket string, args ...string) (string, error) {
	t.Helper()
	cmd := newCommand(func(string) (string, bool) { return socket, true })
	var out bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

// served is a simulated machine behind "nvmlsimctl serve".
func served(t *testing.T) (socket string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "sim")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	serve := newCommand(os.LookupEnv)
	serve.SetArgs([]string{"serve", "--profile=dgx-h100", "--node-name=node-1", "--dir=" + dir})
	serve.SetErr(io.Discard)
	go func() { ended <- serve.ExecuteContext(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	socket = filepath.Join(dir, nvmlsim.ControlSocket)
	for {
		if _, err := ctl(t, socket, "state"); err == nil {
			return socket
		}
	}
}

func state(t *testing.T, socket string) nvmlsim.State {
	t.Helper()
	shown := shown(t, socket, "yaml")
	for i := range shown.GPUs {
		shown.State.GPUs = append(shown.State.GPUs, shown.GPUs[i].GPUState)
	}
	return *shown.State
}

func shown(t *testing.T, socket, format string) shownState {
	t.Helper()
	out, err := ctl(t, socket, "state", "-o", format)
	if err != nil {
		t.Fatal(err)
	}
	var s shownState
	if err := yaml.UnmarshalStrict([]byte(out), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// A GPU that is seen in the state can be commanded by the names that it has there.
func TestTheStateNamesItsGPUs(t *testing.T) {
	socket := served(t)
	for _, format := range []string{"yaml", "json"} {
		gpus := shown(t, socket, format).GPUs
		if len(gpus) != 8 {
			t.Fatalf("%d GPUs in %s, want 8", len(gpus), format)
		}
		for i, gpu := range gpus {
			for _, name := range []string{gpu.UUID, strconv.Itoa(gpu.Index)} {
				if _, err := ctl(t, socket, "gpu", "lose", name); err != nil || !state(t, socket).GPUs[i].Lost {
					t.Errorf("GPU %d is not lost by its name %q in %s: %v", i, name, format, err)
				}
				if _, err := ctl(t, socket, "gpu", "restore", name); err != nil {
					t.Error(err)
				}
			}
			if !regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`).MatchString(gpu.Address) {
				t.Errorf("GPU %d has the address %q in %s", i, gpu.Address, format)
			}
		}
	}
}

// TestEveryCommandDoesWhatItSays runs them all, in an order in which they work, and looks at what has changed.
func TestEveryCommandDoesWhatItSays(t *testing.T) {
	socket := served(t)
	u32 := func(n uint32) *uint32 { return &n }
	type gpus = []nvmlsim.GPUState
	steps := []struct {
		args string
		gpu  int
		got  func(nvmlsim.GPUState) any
		want any
	}{
		{"gpu lose 3", 3, func(g nvmlsim.GPUState) any { return g.Lost }, true},
		{"gpu restore 3", 3, func(g nvmlsim.GPUState) any { return g.Lost }, false},
		{"gpu hang 3", 3, func(g nvmlsim.GPUState) any { return g.Hung }, true},
		{"gpu unhang 3", 3, func(g nvmlsim.GPUState) any { return g.Hung }, false},
		{"gpu slow 3 20", 3, func(g nvmlsim.GPUState) any { return g.Slow }, nvmlsim.Milliseconds(20)},
		{"gpu slow 3 0", 3, func(g nvmlsim.GPUState) any { return g.Slow }, nvmlsim.Milliseconds(0)},
		{"gpu remove 3", 3, func(g nvmlsim.GPUState) any { return g.Absent }, true},
		{"gpu add 3", 3, func(g nvmlsim.GPUState) any { return g.Absent }, false},
		{"temp 3 95", 3, func(g nvmlsim.GPUState) any { return g.Health.TemperatureC }, u32(95)},
		{"temp 3 idle", 3, func(g nvmlsim.GPUState) any { return g.Health.TemperatureC }, (*uint32)(nil)},
		{"power 3 600", 3, func(g nvmlsim.GPUState) any { return g.Health.PowerWatts }, u32(600)},
		{"pcie 3 1 4 --replays 2", 3, func(g nvmlsim.GPUState) any { return *g.Health.PCIe }, nvmlsim.PCIe{Generation: 1, Width: 4}},
		{"pcie 3 best", 3, func(g nvmlsim.GPUState) any { return g.Health.PCIe }, (*nvmlsim.PCIe)(nil)},
		{"throttle 3 hw-slowdown idle", 3, func(g nvmlsim.GPUState) any { return g.Health.Throttle }, uint64(9)},
		{"throttle 3", 3, func(g nvmlsim.GPUState) any { return g.Health.Throttle }, uint64(0)},
		{
			"load 3 --gpu 90 --sm 40 --tensor 30 --memory 20 --encoder 2 --decoder 3 --pcie-transmit 4 --pcie-receive 5 --nvlink-transmit 6 --nvlink-receive 7 --energy 8", 3,
			func(g nvmlsim.GPUState) any { return g.Health.Load },
			nvmlsim.Load{
				GPU: 90, SM: 40, Tensor: 30, Memory: 20, Encoder: 2, Decoder: 3, PCIeTransmit: 4, PCIeReceive: 5,
				NVLinkTransmit: 6, NVLinkReceive: 7, Energy: 8,
			},
		},
		{"load 3", 3, func(g nvmlsim.GPUState) any { return g.Health.Load }, nvmlsim.Load{}},
		{"recovery 3 gpu-reset", 3, func(g nvmlsim.GPUState) any { return g.Health.Recovery }, nvmlsim.RecoveryReset},
		{"recovery 3 none", 3, func(g nvmlsim.GPUState) any { return g.Health.Recovery }, nvmlsim.RecoveryNone},
		{"ecc 3 --corrected 2 --uncorrected 1", 3, func(g nvmlsim.GPUState) any { return g.Health.Volatile }, nvmlsim.ECCCounts{Corrected: 2, Uncorrected: 1}},
		{"gpu reset 3", 3, func(g nvmlsim.GPUState) any { return g.Health.Volatile }, nvmlsim.ECCCounts{}},
		{"remap 3 --corrected 1 --pending --failed", 3, func(g nvmlsim.GPUState) any { return g.Health.Rows }, nvmlsim.Rows{Corrected: 1, Pending: true, Failed: true}},
		{"timeslice 3 Long", 3, func(g nvmlsim.GPUState) any { return g.TimeSlice }, nvmlsim.TimeSliceLong},
		{"timeslice 3 default", 3, func(g nvmlsim.GPUState) any { return g.TimeSlice }, nvmlsim.TimeSliceDefault},
		{"refuse 3 mps timeslice", 3, func(g nvmlsim.GPUState) any { return g.Refused }, []nvmlsim.Setting{"mps", "timeslice"}},
		{"refuse 3", 3, func(g nvmlsim.GPUState) any { return g.Refused }, []nvmlsim.Setting(nil)},
		{"persistence 3 off", 3, func(g nvmlsim.GPUState) any { return g.Persistence }, false},
		{"persistence 3 on", 3, func(g nvmlsim.GPUState) any { return g.Persistence }, true},
		{"leak 3 64", 3, func(g nvmlsim.GPUState) any { return g.LeakedMiB }, uint64(64)},
		{"compute-mode 3 Exclusive_Process", 3, func(g nvmlsim.GPUState) any { return g.ComputeMode }, nvmlsim.ComputeExclusiveProcess},
		{"proc add 2 77 --memory-mib 10 --kind mps", 2, func(g nvmlsim.GPUState) any { return g.Processes }, []nvmlsim.Process{{PID: 77, Kind: "mps", MemoryMiB: 10}}},
		{"proc rm 2 77", 2, func(g nvmlsim.GPUState) any { return g.Processes }, []nvmlsim.Process(nil)},
		{"mig enable 2", 2, func(g nvmlsim.GPUState) any { return g.MIG }, true},
		{"mig create 2 1g.20gb --start 4", 2, func(g nvmlsim.GPUState) any { return g.Instances[0].Start }, uint32(4)},
		{"load 2 --instance 5 --sm 60", 2, func(g nvmlsim.GPUState) any { return g.Instances[0].Load }, nvmlsim.Load{SM: 60}},
		{"proc add 2 78 --instance 5/0", 2, func(g nvmlsim.GPUState) any { return *g.Processes[0].Instance }, nvmlsim.Instance{GPU: 5}},
		{"ecc 2 --uncorrected 1 --instance 5/0", 2, func(g nvmlsim.GPUState) any { return g.Health.Volatile }, nvmlsim.ECCCounts{Uncorrected: 1}},
		{"proc rm 2 78", 2, func(g nvmlsim.GPUState) any { return len(g.Processes) }, 0},
		{"mig destroy 2 5", 2, func(g nvmlsim.GPUState) any { return len(g.Instances) }, 0},
		{"mig create 2 2g.20gb --start 0 --compute 1,1", 2, func(g nvmlsim.GPUState) any { return len(g.Instances[0].Compute) }, 2},
		{"mig destroy 2 3", 2, func(g nvmlsim.GPUState) any { return len(g.Instances) }, 0},
		{"mig disable 2", 2, func(g nvmlsim.GPUState) any { return g.MIG }, false},
	}
	for _, step := range steps {
		if _, err := ctl(t, socket, strings.Fields(step.args)...); err != nil {
			t.Errorf("%s: %v", step.args, err)
			continue
		}
		if diff := cmp.Diff(step.want, step.got(gpus(state(t, socket).GPUs)[step.gpu])); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.args, diff)
		}
	}
	if events := state(t, socket).Events; !slices.ContainsFunc(events, func(e nvmlsim.Event) bool {
		return e.GPU == 2 && e.Type == nvml.EventTypeDoubleBitEccError && e.Instance != nil && *e.Instance == nvmlsim.Instance{GPU: 5}
	}) {
		t.Errorf("no event tells whose memory error it was: %v", events)
	}
	if _, err := ctl(t, socket, "xid", "1", "79"); err != nil {
		t.Error(err)
	}
	events := state(t, socket).Events
	if last := events[len(events)-1]; last.GPU != 1 || last.Data != 79 {
		t.Errorf("last event %+v, want XID 79 of GPU 1", last)
	}
	for _, step := range []struct {
		args    string
		loaded  bool
		version string
	}{
		{"driver unload", false, ""},
		{"driver load", true, ""},
		{"driver unload", false, ""},
		{"driver load --version 580.65.06", true, "580.65.06"},
		{"driver unload", false, "580.65.06"},
		{"driver load", true, "580.65.06"},
	} {
		_, err := ctl(t, socket, strings.Fields(step.args)...)
		if driver := state(t, socket).Driver; err != nil || driver.Loaded != step.loaded || driver.Version != step.version {
			t.Errorf("%s: %+v, %v", step.args, driver, err)
		}
	}
	before := state(t, socket).BootID
	if _, err := ctl(t, socket, "reboot"); err != nil || state(t, socket).BootID == before {
		t.Errorf("reboot: %v", err)
	}
}

func TestAMIGDeviceIsPrinted(t *testing.T) {
	socket := served(t)
	if _, err := ctl(t, socket, "mig", "enable", "0"); err != nil {
		t.Fatal(err)
	}
	out, err := ctl(t, socket, "mig", "create", "0", "3g.40gb", "--start", "4")
	if err != nil || !regexp.MustCompile(`^MIG-[0-9a-f-]{36} 2/0\n$`).MatchString(out) {
		t.Errorf("%q, %v", out, err)
	}
}

func TestBadInputIsNamed(t *testing.T) {
	socket := served(t)
	missing := filepath.Join(t.TempDir(), "none.sock")
	tests := map[string]struct {
		socket string
		args   string
		want   string
	}{
		"GPU that is not":       {socket, "gpu lose 8", `gpu lose: GPU "8": want an index from 0 to 7, or a UUID such as `},
		"code that is none":     {socket, "xid 0 bus", `CODE "bus"`},
		"process that is none":  {socket, "proc add 0 x", `PID "x"`},
		"process to end":        {socket, "proc rm 0 x", `PID "x"`},
		"instance that is none": {socket, "proc add 0 1 --instance 7", `--instance "7"`},
		"ECC of no instance":    {socket, "ecc 0 --uncorrected 1 --instance 7/0", "--instance 7/0: there is no such compute instance"},
		"ECC of half of one":    {socket, "ecc 0 --uncorrected 1 --instance 7", `--instance "7"`},
		"half an instance":      {socket, "xid 0 43 --instance /1", `--instance "/1"`},
		"instance to destroy":   {socket, "mig destroy 0 all", `INSTANCE "all"`},
		"start below the first": {socket, "mig create 0 1g.10gb --start -1", "--start -1"},
		"neither hot nor idle":  {socket, "temp 0 warm", `CELSIUS "warm": want a number or idle`},
		"celsius too many":      {socket, "temp 0 1000", "temp: CELSIUS 1000: want at most 150"},
		"width beside best":     {socket, "pcie 0 best 4", `WIDTH "4": best takes none`},
		"generation too high":   {socket, "pcie 0 9 16", "GENERATION 9: want 1 to "},
		"action that is none":   {socket, "recovery 0 noneX", `recovery: ACTION "noneX": want one of `},
		"action or none":        {socket, "recovery 0 x", ", or none"},
		"mode that is none":     {socket, "compute-mode 0 x", `MODE "x": want one of `},
		"persistence":           {socket, "persistence 0 enabled", `MODE "enabled": want on or off`},
		"time that is none":     {socket, "timeslice 0 short", `TIME "short": want Short, Medium, Long, or default`},
		"reason that is none":   {socket, "throttle 0 x", `REASON "x": want some of `},
		"kind that is none":     {socket, "proc add 0 1 --kind x", `--kind "x": want compute, graphics or mps`},
		"memory that is not":    {socket, "proc add 0 1 --memory-mib 99999999", "--memory-mib 99999999: only "},
		"leak of too much":      {socket, "leak 0 99999999", "MIB 99999999: only "},
		"instance that is not":  {socket, "mig destroy 0 77", "INSTANCE 77: "},
		"no errors to count":    {socket, "ecc 0", "--corrected, --uncorrected 0: want a number of errors"},
		"rows below nothing":    {socket, "remap 0 --corrected -3", "--corrected -3: want 0 or more"},
		"daemon that is none":   {socket, "stop-mps x", `DAEMON "x": there is none with that name`},
		"an argument too few":   {socket, "gpu lose", "0 arguments: want nvmlsimctl gpu lose GPU"},
		"an argument too many":  {socket, "reboot now", "1 arguments: want nvmlsimctl reboot"},
		"a choice of numbers":   {socket, "pcie 0", "1 arguments: want nvmlsimctl pcie GPU best|GENERATION WIDTH"},
		"power of no number":    {socket, "power 0 much", `WATTS "much"`},
		"generation alone":      {socket, "pcie 0 3", `GENERATION "3"`},
		"width that is none":    {socket, "pcie 0 3 wide", `WIDTH "wide"`},
		"output of no kind":     {socket, "state -o xml", `--output "xml"`},
		"nobody serves":         {missing, "reboot", missing},
		"no such command":       {socket, "gpus", "gpus"},
		"library of no version": {socket, "library a b", "driver"},
		"library that is none":  {socket, "library --driver 570.1 /dev/null " + filepath.Join(t.TempDir(), "to"), "library: /dev/null: not a simulated NVML library"},
		"library of no form":    {socket, "library --driver 570 /dev/null x", `driver version "570"`},
		"profile that is none":  {socket, "serve --profile abacus --node-name n --dir " + t.TempDir(), "--profile: unknown GPU profile"},
		"folder that is none":   {socket, "serve --profile t4 --node-name n --dir /dev/null", "--dir: "},
		"serve without a name":  {socket, "serve --profile t4 --dir x", "node-name"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := ctl(t, test.socket, strings.Fields(test.args)...)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestEveryCommandHasALine(t *testing.T) {
	var visit func(*cobra.Command)
	visit = func(cmd *cobra.Command) {
		if cmd.Short == "" {
			t.Errorf("%s has no line for its help", cmd.CommandPath())
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(newCommand(os.LookupEnv))
}

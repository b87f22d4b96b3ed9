// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	policyapi "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// example is the cluster of the golden files: a node half full, one full and partly ill, one empty; pods that wait for various reasons.
func example(t *testing.T) string {
	t.Helper()
	c := snapshottest.New(3, 4)
	c.Run("team-a", "train", 0, 0, 0, 1)
	c.Run("team-b", "serve", 10, 1, 0)
	c.Run("team-b", "batch", 0, 1, 1, 2)
	c.Taint(1, 3, "gpu.nvidia.com/xid")
	c.Pod("team-a", "small", 1, 0)
	large, _ := c.Pod("team-a", "large", 5, 0)
	late, _ := c.Pod("team-b", "picky", 2, 0)
	late.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": "worker-1"}
	urgent, _ := c.Pod("team-b", "urgent", 2, 100)
	urgent.Spec.NodeSelector = late.Spec.NodeSelector
	for _, tried := range []*v1.Pod{large, late, urgent} { // small has no scheduler
		tried.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse}}
	}
	c.Pod("team-c", "unclaimed", 1, 0)
	c.ResourceClaims = c.ResourceClaims[:len(c.ResourceClaims)-1]
	guarded, _ := c.Run("team-c", "guarded", 0, 2, 0)
	guarded.Labels = map[string]string{"app": "guarded"}
	guarded.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}
	c.PodDisruptionBudgets = []*policyapi.PodDisruptionBudget{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-c", Name: "guarded"},
		Spec:       policyapi.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: guarded.Labels}},
	}}
	return write(t, c)
}

func write(t testing.TB, c *snapshottest.Cluster) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "cluster.json")
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Snapshot().Write(file), file.Close()); err != nil {
		t.Fatal(err)
	}
	return name
}

// What a tenant writes neither commands the terminal nor changes the order of other text.
func TestTextForTerminals(t *testing.T) {
	for text, want := range map[string]string{
		"\x1b[2Ja\u009b1m\x7f": "?[2Ja?1m?", "a\u202eb\u2066c\u200fd": "a?b?c?d", "a\u200bb\ufeffc\u2028d\U000e0041e": "a?b?c?d?e", "größer 8×": "größer 8×",
	} {
		if got := printable(text); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

// A share of memory is told whether or not the driver names it with its domain.
func TestHolderOfAShare(t *testing.T) {
	for _, name := range []string{"memory", "gpu.example.com/memory"} {
		h := clusterview.Holder{Namespace: "a", Pods: []string{"p"}, Share: map[string]string{name: "10Gi"}}
		if got := describeHolder(&h, "gpu.example.com"); got != "a/p(10Gi)" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// A device is found by its name before it is taken for a partition of another one, whose holder has it.
func TestTheGPUOfADevice(t *testing.T) {
	part := &clusterview.GPU{Driver: "d", Pool: "p", Device: "part"}
	whole := &clusterview.GPU{Driver: "d", Pool: "p", Device: "a-whole", Holders: []clusterview.Holder{{Namespace: "a", Claim: "c", Device: "part"}}}
	for name, tc := range map[string]struct {
		gpus []*clusterview.GPU
		want *clusterview.GPU
	}{
		"both":        {[]*clusterview.GPU{whole, part}, part},
		"the whole":   {[]*clusterview.GPU{whole}, whole},
		"neither one": {nil, nil},
	} {
		if got := gpuOf(tc.gpus, "d", "p", "part"); got != tc.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := describeHolder(&whole.Holders[0], "d"); got != "claim a/c(part)" {
		t.Error(got)
	}
}

// What frag leaves out because of its node, it names.
func TestFragNamesNodesThatTakeNoPods(t *testing.T) {
	c := snapshottest.New(2, 1)
	c.Nodes[1].Spec.Unschedulable = true
	var out bytes.Buffer
	if got := run(t.Context(), []string{"frag", "--snapshot", write(t, c)}, genericiooptions.IOStreams{Out: &out, ErrOut: &out}); got != 0 {
		t.Fatal(out.String())
	}
	if want := "Left out, because they are cordoned, not ready or gone: worker-1."; !strings.Contains(out.String(), want) ||
		strings.Contains(out.String(), "worker-0, worker-1") {
		t.Errorf("%s\nwant %s", &out, want)
	}
}

// Every output is what its golden file has: elsewhere than on a terminal, and on terminals of two widths, with colors.
func TestOutputs(t *testing.T) {
	file := example(t)
	for name, tc := range map[string]struct {
		args []string
		want int
	}{
		"gpus":           {[]string{"gpus"}, 0},
		"gpus-wide":      {[]string{"gpus", "-o", "wide"}, 0},
		"gpus-yaml":      {[]string{"gpus", "-o", "yaml", "--node", "worker-1"}, 0},
		"gpus-json":      {[]string{"gpus", "-o", "json", "--state", "tainted"}, 0},
		"gpus-bare":      {[]string{"gpus", "--no-headers", "--state", "held"}, 0},
		"claims":         {[]string{"claims", "-n", "team-a"}, 0},
		"claims-all":     {[]string{"claims", "-A", "-o", "wide"}, 0},
		"claims-none":    {[]string{"claims", "-n", "team-x"}, 0},
		"topo":           {[]string{"topo", "node/worker-1"}, 0},
		"topo-json":      {[]string{"topo", "worker-1", "-o", "json"}, 0},
		"frag":           {[]string{"frag"}, 0},
		"why-runs":       {[]string{"why", "train", "-n", "team-a"}, 0},
		"why-fits":       {[]string{"why", "pod/small", "-n", "team-a"}, 0},
		"why-elsewhere":  {[]string{"why", "team-a/train"}, 0},
		"why-never":      {[]string{"why", "large", "-n", "team-a"}, exitNo},
		"why-holders":    {[]string{"why", "picky", "-n", "team-b"}, exitNo},
		"why-preempts":   {[]string{"why", "urgent", "-n", "team-b", "-o", "wide"}, exitNo},
		"why-json":       {[]string{"why", "picky", "-n", "team-b", "-o", "json"}, exitNo},
		"whatif":         {[]string{"whatif"}, exitNo},
		"whatif-delete":  {[]string{"whatif", "--delete", "team-b/batch", "--add-node", "worker-2=1", "--drain", "worker-0"}, 0},
		"why-refused":    {[]string{"why", "unclaimed", "-n", "team-c"}, exitNo},
		"whatif-guarded": {[]string{"whatif", "--drain", "worker-2"}, exitNo},
		"whatif-json":    {[]string{"whatif", "-o", "json", "--priority", "50"}, exitNo},
		"doctor":         {[]string{"doctor"}, exitNo},
		"doctor-wide":    {[]string{"doctor", "-o", "wide"}, exitNo},
		"doctor-bare":    {[]string{"doctor", "--no-headers"}, exitNo},
		"doctor-json":    {[]string{"doctor", "-o", "json"}, exitNo},
		"no-such-pod":    {[]string{"why", "nobody"}, exitError},
		"gpus-none":      {[]string{"gpus", "--node", "nowhere"}, 0},
		"other-space":    {[]string{"why", "large"}, exitError},
		"no-pod":         {[]string{"why"}, exitUsage},
		"two-nodes":      {[]string{"topo", "worker-0", "worker-1"}, exitUsage},
		"no-manifest":    {[]string{"whatif", "-f", "testdata/nowhere.yaml"}, exitError},
		"no-such-node":   {[]string{"topo", "nowhere"}, exitError},
		"wrong-output":   {[]string{"gpus", "-o", "xml"}, exitUsage},
		"wrong-state":    {[]string{"gpus", "--state", "busy"}, exitUsage},
		"wrong-profile":  {[]string{"whatif", "--add-node", "p5"}, exitUsage},
		"wrong-argument": {[]string{"gpus", "all"}, exitUsage},
		"wrong-command":  {[]string{"gpu"}, exitUsage},
		"watch-a-file":   {[]string{"gpus", "-w"}, exitUsage},
		"map-port":       {[]string{"map", "--port", "70000"}, exitUsage},
	} {
		t.Run(name, func(t *testing.T) {
			args := append(tc.args, "--snapshot", file)
			var out, errOut bytes.Buffer
			if got := run(t.Context(), args, genericiooptions.IOStreams{
				In: strings.NewReader(""), Out: &out,
				ErrOut: &errOut,
			}); got != tc.want {
				t.Errorf("exit code %d, want %d", got, tc.want)
			}
			golden(t, name, out.String()+errOut.String())
			if tc.want == exitUsage || strings.Contains(name, "json") {
				return
			}
			for _, width := range []uint16{80, 200} {
				golden(t, fmt.Sprintf("%s-%d", name, width), onTerminal(t, args, width))
			}
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(file, []byte(got), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-update writes it anew): %s", file, diff)
	}
}

var escape = regexp.MustCompile(`\x1b\[\d+m`)

// onTerminal runs a command on a terminal, and checks that no line is wider than it.
func onTerminal(t *testing.T, args []string, width uint16) string {
	t.Helper()
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	t.Setenv("COLUMNS", "")
	primary, secondary := terminalOfWidth(t, width)
	const end = "\x00" // what is on its way when a terminal is closed may be lost
	read := make(chan string)
	go func() {
		content, err := bufio.NewReader(primary).ReadString(end[0])
		if err != nil {
			t.Error(err)
		}
		read <- strings.TrimSuffix(content, end)
	}()
	run(context.WithoutCancel(t.Context()), args, genericiooptions.IOStreams{In: secondary, Out: secondary, ErrOut: secondary})
	_, err := secondary.WriteString(end)
	if err := errors.Join(err, secondary.Close()); err != nil {
		t.Fatal(err)
	}
	out := strings.ReplaceAll(<-read, "\r\n", "\n")
	for line := range strings.Lines(out) {
		// Errors are not wrapped: they are for logs, too.
		if n := len([]rune(strings.TrimSuffix(escape.ReplaceAllString(line, ""), "\n"))); n > int(width) &&
			!strings.HasPrefix(line, "error:") {
			t.Errorf("a line has %d columns of %d: %q", n, width, line)
		}
	}
	return out
}

// terminalOfWidth opens a pseudo terminal.
func terminalOfWidth(t *testing.T, width uint16) (primary, secondary *os.File) {
	t.Helper()
	primary, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { primary.Close() })
	fd := int(primary.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err := errors.Join(err, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0), unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ,
		&unix.Winsize{Row: 50, Col: width})); err != nil {
		t.Fatal(err)
	}
	if secondary, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	return primary, secondary
}

// Where no device matches a request, nobody is told to ask for none.
func TestNobodyIsToldToAskForNone(t *testing.T) {
	c := snapshottest.New(1, 2)
	_, claim := c.Pod("team-a", "huge", 1, 0)
	claim.Spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: `device.attributes["resource.kubernetes.io"].numaNode == 9`,
	}}}
	var out bytes.Buffer
	run(t.Context(), []string{"why", "huge", "-n", "team-a", "--snapshot", write(t, c)}, genericiooptions.IOStreams{Out: &out, ErrOut: &out})
	if !strings.Contains(out.String(), "no node has a device that matches it: add a node with 1.") || strings.Contains(out.String(), "no more than 0") {
		t.Error(out.String())
	}
}

// In a cluster that has scaled down to no nodes, that is the answer, and no error.
func TestThereAreNoNodes(t *testing.T) {
	c := snapshottest.New(0, 0)
	c.Pod("team-a", "first", 1, 0)
	c.Pod("team-a", "second", 2, 7)
	file := write(t, c)
	for name, args := range map[string][]string{"why": {"why", "first", "-n", "team-a"}, "whatif": {"whatif"}} {
		var out bytes.Buffer
		code := run(t.Context(), append(args, "--snapshot", file), genericiooptions.IOStreams{Out: &out, ErrOut: &out})
		if code != exitNo || !strings.Contains(out.String(), simulate.NoNodes) || !strings.Contains(out.String(), "A node: there is none.") {
			t.Errorf("%s: exit code %d, %s", name, code, out.String())
		}
	}
}

// Rows of equal names, of two drivers, are told apart by --watch.
func TestRowsHaveKeys(t *testing.T) {
	c := snapshottest.New(1, 1)
	other := c.ResourceSlices[0].DeepCopy()
	other.Name, other.Spec.Driver = "other", "gpu.example.com"
	c.ResourceSlices = append(c.ResourceSlices, other)
	c.Pod("a", "one", 1, 0)
	c.Pod("b", "one", 1, 0)
	for name, table := range map[string]*table{
		"gpus":   (&cli{}).gpuTable(clusterview.GPUs(c.Snapshot())),
		"claims": (&cli{}).claimTable(c.Snapshot(), clusterview.Claims(c.Snapshot()), false),
	} {
		if len(table.rows) != 2 || len(table.keys) != 2 || table.keys[0] == table.keys[1] {
			t.Errorf("%s: %d rows, keys %q", name, len(table.rows), table.keys)
		}
	}
}

// A snapshot of a snapshot is the same, and its answers with hashed names are alike.
func TestASnapshotOfASnapshot(t *testing.T) {
	file := example(t)
	first, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	command := func(args ...string) string {
		var out bytes.Buffer
		run(t.Context(), args, genericiooptions.IOStreams{In: bytes.NewReader(first), Out: &out, ErrOut: &out})
		return out.String()
	}
	if diff := cmp.Diff(string(first), command("snapshot", "--snapshot", "-")); diff != "" {
		t.Error(diff)
	}
	hashed := command("snapshot", "--hash-names", "--snapshot", file)
	name := filepath.Join(t.TempDir(), "hashed.json")
	if err := os.WriteFile(name, []byte(hashed), 0o600); err != nil {
		t.Fatal(err)
	}
	last := func(s string) string { return s[strings.Index(s, "12 GPUs"):strings.LastIndex(s, " on ")] }
	if a, b := last(command("gpus", "--snapshot", file)), last(command("gpus", "--snapshot", name)); a != b {
		t.Errorf("%q and %q", a, b)
	}
	if again := command("whatif", "--snapshot", name); again != command("whatif", "--snapshot", name) ||
		!strings.Contains(again, "5 pods: 2 would have a place, 3 would not.") {
		t.Errorf("%s", again)
	}
}

// What anybody wrote into a file cannot command the terminal, in errors neither.
func TestErrorsAreLegible(t *testing.T) {
	file := `{"apiVersion":"stowage.dev/v1alpha1","kind":"ClusterSnapshot","pods":[{"metadata":{"name":"\u001b[31m\u009b2J"}}]}`
	var out, errOut bytes.Buffer
	got := run(t.Context(), []string{"gpus", "--snapshot", "-"}, genericiooptions.IOStreams{In: strings.NewReader(file), Out: &out, ErrOut: &errOut})
	if want := "error: snapshot in the standard input: pods ?[31m?2J: metadata.uid: Required value\n"; got != exitError || errOut.String() != want {
		t.Errorf("exit code %d, %q", got, errOut.String())
	}
}

// An answer that was interrupted is none.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errOut bytes.Buffer
	got := run(ctx, []string{"why", "small", "-n", "team-a", "--snapshot", example(t)}, genericiooptions.IOStreams{Out: &out, ErrOut: &errOut})
	if got != exitError || out.Len() > 0 || !strings.Contains(errOut.String(), "interrupted") {
		t.Errorf("exit code %d, %q, %q", got, out.String(), errOut.String())
	}
}

// Colors are for terminals, unless somebody does not want them; text from the API commands no terminal.
func TestColors(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
	c := &cli{color: "auto"}
	_, secondary := terminalOfWidth(t, 80)
	defer secondary.Close()
	c.Out = secondary
	if c.terminalOf().color {
		t.Error("colors in spite of NO_COLOR")
	}
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	if got := c.terminalOf(); !got.color || got.width != 80 {
		t.Errorf("%+v", got)
	}
	c.color = "never"
	if c.terminalOf().color {
		t.Error("colors in spite of --color never")
	}
	if got := printable("a\x1b[2Jb\u009bc\n"); got != "a?[2Jb?c?" {
		t.Errorf("%q", got)
	}
}

// processorTime is what this process has taken of the processors so far.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkLargeCluster is on 5,000 nodes of 8 GPUs, nearly all held, from the file to the printed answer.
func BenchmarkLargeCluster(b *testing.B) {
	collectLate()
	defer collectInTime()
	c := snapshottest.Full(5000)
	c.Pod("team-0", "four", 4, 0)
	file := write(b, c)
	manifest := filepath.Join(b.TempDir(), "pods.yaml")
	if err := os.WriteFile(manifest, []byte(hundred), 0o600); err != nil {
		b.Fatal(err)
	}
	for name, args := range map[string][]string{
		"gpus": {"gpus"}, "why": {"why", "four", "-n", "team-0"}, "frag": {"frag"}, "doctor": {"doctor"},
		"whatif": {"whatif", "-f", manifest, "-n", "team-0"},
	} {
		b.Run(name, func(b *testing.B) {
			begun := processorTime(b)
			for b.Loop() {
				run(b.Context(), append(args, "--snapshot", file), genericiooptions.IOStreams{
					In:  strings.NewReader(""),
					Out: io.Discard, ErrOut: io.Discard,
				})
			}
			// On a busy machine it says more than the time that passes.
			b.ReportMetric((processorTime(b)-begun).Seconds()/float64(b.N), "cpu-s/op")
		})
	}
}

const hundred = `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: hundred}
spec:
  parallelism: 100
  template:
    spec:
      restartPolicy: Never
      resourceClaims: [{name: gpu, resourceClaimTemplateName: one}]
      containers: [{name: main, image: x, resources: {claims: [{name: gpu}]}}]
`

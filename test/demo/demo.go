// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/test/lab"
)

const (
	namespace = "demo"
	// podTimeout is for a pod from its creation until it is ready, on a machine
	// that does much else. What a kubelet is refused, for instance a claim that it
	// asks for too early, it tries again after 60 to 90 s: there is room for that
	// more than once.
	podTimeout = 5 * time.Minute
)

// machine is a node of the demo.
type machine struct {
	name, nvml string
	gpus       int
	real       bool
	// agent has further arguments of the node agent.
	agent []string
}

// unsatisfiable is the example that must wait.
const unsatisfiable = "unsatisfiable"

// machines are chosen so that every example has a place: only the L40S servers
// have four GPUs below one PCIe root, only A100 and B200 have 80 GiB, only one H100
// is offered in shares.
var machines = []machine{
	{name: "h100", nvml: "sim:dgx-h100", gpus: 8, real: true, agent: []string{"--share-gpus=7"}},
	{name: "a100", nvml: "sim:dgx-a100", gpus: 8},
	{name: "b200", nvml: "sim:hgx-b200", gpus: 8},
	{name: "l40s", nvml: "sim:l40s", gpus: 8},
}

// waves are the example files in the order in which they are applied. All pods of
// a wave run before the next begins, so that every example has a place wherever the
// scheduler puts the others of its wave: the large ones come while there are whole
// machines free, after those that want the one GPU in shares, and the pair of one PCIe root before single GPUs fill the only
// root that may be left with two, on the L40S server.
var waves = [][]string{
	{"half-a-gpu"},
	{"product-by-name", "memory-80gi", "four-gpus-one-pcie-root"},
	{"eight-gpus"},
	{"two-gpus-one-pcie-root"},
	{"one-gpu", "extended-resource", "shared-claim", "first-available", "unsatisfiable"},
}

// demo is one run.
type demo struct {
	out    io.Writer
	root   string
	hollow bool
	// keep leaves the cluster up until somebody ends it: make lab.
	keep bool
	// nodes are those to start, and examples those to run; nil for all.
	nodes    []machine
	examples []string

	lab       *lab.Lab
	scheduler *localcluster.Scheduler
	begun     time.Time
	// waiting: all is as it should be, and the cluster runs until somebody ends it.
	waiting bool
}

func (d *demo) run(ctx context.Context) (err error) {
	d.begun = time.Now()
	defer func() {
		stopErr := d.stop(err != nil && ctx.Err() == nil)
		if d.waiting { // what ended before is told of already, and may have been ended on purpose
			stopErr = withoutExits(stopErr)
		}
		if stopErr != nil {
			err = errors.Join(err, fmt.Errorf("stopping the cluster: %w", stopErr))
		}
		if err == nil && !d.keep {
			fmt.Fprintf(d.out, "\nEverything was as it should be. %s in all. `make lab` keeps such a cluster up, to play in.\n",
				time.Since(d.begun).Round(time.Second))
		}
	}()
	if d.hollow {
		fmt.Fprintln(d.out, "Hollow nodes only: they speak the kubelet's protocols and start no containers. A real node needs root.")
	}
	sets := []localcluster.BinarySet{localcluster.ControlPlane}
	if !d.hollow {
		sets = append(sets, localcluster.Node)
	}
	if err := d.stages(ctx, []stage{
		{"build the cluster's programs, or find them in the cache", func(ctx context.Context) error {
			_, err := localcluster.EnsureBinaries(ctx, d.out, sets...)
			return err
		}},
		{"start etcd, kube-apiserver and kube-controller-manager; grant rights, define classes", d.startCluster},
		{"start Stowage's scheduler", func(ctx context.Context) error {
			var err error
			d.scheduler, err = d.lab.StartStowage(ctx)
			return err
		}},
		{"start the nodes and their agents", d.startNodes},
	}); err != nil {
		return err
	}
	if d.keep {
		return d.runLab(ctx)
	}
	var rows []lab.Row
	if err := d.stages(ctx, []stage{
		{"run the examples", d.runExamples},
		{"compare what the containers saw with what was allocated", func(ctx context.Context) error {
			var err error
			rows, err = d.readBack(ctx)
			return err
		}},
	}); err != nil {
		return err
	}
	if err := printTable(d.out, rows); err != nil {
		return err
	}
	if err := d.showUse(ctx); err != nil {
		return err
	}
	return d.stages(ctx, []stage{{"delete the pods and check that nothing is left", d.cleanUp}})
}

// stage is one step.
type stage struct {
	name string
	do   func(context.Context) error
}

// stages runs steps, and prints how long each took.
func (d *demo) stages(ctx context.Context, stages []stage) error {
	for _, stage := range stages {
		fmt.Fprintf(d.out, "==> %s\n", stage.name)
		begin := time.Now()
		if err := stage.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", stage.name, err)
		}
		fmt.Fprintf(d.out, "    done in %.1f s\n", time.Since(begin).Seconds())
	}
	return nil
}

func (d *demo) startCluster(ctx context.Context) error {
	var err error
	d.lab, err = lab.Start(ctx, lab.Options{
		Root:      d.root,
		Scheduler: filepath.Join(d.root, "bin", "scheduler"),
		Agent:     filepath.Join(d.root, "bin", "node-agent"),
		Library:   filepath.Join(d.root, "bin", "nvml", "libnvidia-ml.so.1"),
		Progress:  d.out,
	})
	if err != nil {
		return err
	}
	if err := d.logToFile(); err != nil {
		return err
	}
	return d.lab.CreateNamespace(ctx, namespace)
}

// logToFile keeps what libraries and hollow kubelets log out of the demo's output.
func (d *demo) logToFile() error {
	file, err := os.Create(filepath.Join(d.lab.LogDir(), "demo.log"))
	if err != nil {
		return err
	}
	klog.LogToStderr(false)
	klog.SetOutput(file)
	return nil
}

func (d *demo) startNodes(ctx context.Context) error {
	for _, m := range d.nodes {
		var err error
		if m.real && !d.hollow {
			_, err = d.lab.StartRealNode(ctx, m.name, m.nvml, m.agent...)
		} else {
			_, err = d.lab.StartHollowNode(ctx, m.name, m.nvml, m.agent...)
		}
		if err != nil {
			return err
		}
	}
	for _, m := range d.nodes {
		if err := d.lab.WaitForSlices(ctx, m.name, m.gpus); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) runExamples(ctx context.Context) error {
	for _, wave := range waves {
		var files []string
		for _, example := range wave {
			files = append(files, d.lab.Manifest("examples", example+".yaml"))
		}
		before, err := d.pods(ctx)
		if err != nil {
			return err
		}
		if _, err := d.lab.Kubectl(ctx, "apply", "--namespace="+namespace, "--filename="+strings.Join(files, ",")); err != nil {
			return err
		}
		after, err := d.pods(ctx)
		if err != nil {
			return err
		}
		var running, waiting []string
		for name := range after {
			switch {
			case before[name]:
			case name == unsatisfiable:
				waiting = append(waiting, name)
			default:
				running = append(running, name)
			}
		}
		if len(running) == 0 {
			return fmt.Errorf("the examples %v made no pods", wave)
		}
		if _, err := d.lab.WaitForPods(ctx, namespace, running, "running", podTimeout, lab.Running); err != nil {
			return err
		}
		if _, err := d.lab.WaitForPods(ctx, namespace, waiting, "refused", podTimeout, lab.Unschedulable); err != nil {
			return err
		}
	}
	return nil
}

// pods are the names of the demo's pods.
func (d *demo) pods(ctx context.Context) (map[string]bool, error) {
	list, err := d.lab.AdminClient().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, pod := range list.Items {
		names[pod.Name] = true
	}
	return names, nil
}

// readBack makes a row of every pod that has a node.
func (d *demo) readBack(ctx context.Context) ([]lab.Row, error) {
	list, err := d.lab.AdminClient().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var rows []lab.Row
	for i := range list.Items {
		if pod := &list.Items[i]; pod.Spec.NodeName != "" {
			rows = append(rows, d.lab.Row(ctx, pod))
		}
	}
	claims, err := d.lab.AdminClient().ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	if doubles := lab.Doubles(claims.Items); len(doubles) > 0 {
		return nil, fmt.Errorf("devices are held twice: %v", doubles)
	}
	return rows, nil
}

// showUse prints who has which GPU, and why the pod waits that cannot be satisfied, as kubectl stowage tells it.
func (d *demo) showUse(ctx context.Context) error {
	if _, err := d.lab.WaitForPods(ctx, namespace, []string{unsatisfiable}, "refused", podTimeout, lab.Unschedulable); err != nil {
		return err
	}
	if err := d.stowage(ctx, 0, "gpus"); err != nil {
		return err
	}
	return d.stowage(ctx, saysNo, "why", unsatisfiable, "-n", namespace)
}

// saysNo is the exit code of kubectl stowage for an answer that is no: docs/kubectl.md, *Exit codes*.
const saysNo = 3

// stowage runs kubectl stowage on the cluster, and shows the command with what it prints. It is an error if it exits with another code.
func (d *demo) stowage(ctx context.Context, want int, args ...string) error {
	command := exec.CommandContext(ctx, filepath.Join(d.root, "bin", "kubectl-stowage"),
		append(args, "--kubeconfig", d.lab.AdminKubeconfig())...)
	var failed strings.Builder
	command.Stdout, command.Stderr = d.out, &failed
	fmt.Fprintf(d.out, "$ kubectl stowage %s\n", strings.Join(args, " "))
	err := command.Run()
	fmt.Fprintln(d.out)
	if code := command.ProcessState.ExitCode(); code != want {
		return fmt.Errorf("kubectl stowage %s: exit code %d, want %d: %w %s", strings.Join(args, " "), code, want, err, failed.String())
	}
	return nil
}

func (d *demo) cleanUp(ctx context.Context) error {
	if _, err := d.lab.Kubectl(ctx, "delete", "--namespace="+namespace, "--kustomize="+d.lab.Manifest("examples")); err != nil {
		return err
	}
	return d.lab.WaitForNoLeftovers(ctx, podTimeout)
}

// stop ends the cluster. Its folder with the logs stays if the demo failed.
func (d *demo) stop(failed bool) error {
	if d.lab == nil {
		return nil
	}
	if failed {
		d.lab.Keep()
		fmt.Fprintf(d.out, "The logs stay in %s\n", d.lab.LogDir())
	}
	return d.lab.Stop()
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
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
	wait   bool

	lab       *lab.Lab
	scheduler *localcluster.Scheduler
	begun     time.Time
	// waiting: all is as it should be, and the cluster runs until somebody ends it.
	waiting bool
}

func (d *demo) run(ctx context.Context) (err error) {
	d.begun = time.Now()
	defer func() {
		if stopErr := d.stop(err != nil && ctx.Err() == nil); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("stopping the cluster: %w", stopErr))
		}
		if err == nil {
			fmt.Fprintf(d.out, "\nEverything was as it should be. %s in all.\n", time.Since(d.begun).Round(time.Second))
		}
	}()
	if d.hollow {
		fmt.Fprintln(d.out, "Hollow nodes only: they speak the kubelet's protocols and start no containers. A real node needs root.")
	}
	sets := []localcluster.BinarySet{localcluster.ControlPlane}
	if !d.hollow {
		sets = append(sets, localcluster.Node)
	}
	var rows []lab.Row
	for _, stage := range []struct {
		name string
		do   func(context.Context) error
	}{
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
		{"run the examples", d.runExamples},
		{"compare what the containers saw with what was allocated", func(ctx context.Context) error {
			var err error
			rows, err = d.readBack(ctx)
			return err
		}},
	} {
		if err := d.stage(ctx, stage.name, stage.do); err != nil {
			return err
		}
	}
	if err := printTable(d.out, rows); err != nil {
		return err
	}
	if err := d.showUnsatisfiable(ctx); err != nil {
		return err
	}
	if d.wait {
		d.untilEnded(ctx, d.places())
		return nil
	}
	return d.stage(ctx, "delete the pods and check that nothing is left", d.cleanUp)
}

// untilEnded waits until somebody ends the demo, which has succeeded.
func (d *demo) untilEnded(ctx context.Context, p places) {
	d.waiting = true
	explainWait(d.out, p)
	<-ctx.Done()
	fmt.Fprintln(d.out, "\nStopping the cluster.")
}

// stage runs one step and prints how long it took.
func (d *demo) stage(ctx context.Context, name string, do func(context.Context) error) error {
	fmt.Fprintf(d.out, "==> %s\n", name)
	begin := time.Now()
	if err := do(ctx); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(d.out, "    done in %.1f s\n", time.Since(begin).Seconds())
	return nil
}

func (d *demo) startCluster(ctx context.Context) error {
	var err error
	d.lab, err = lab.Start(ctx, lab.Options{
		Root:      d.root,
		Scheduler: filepath.Join(d.root, "bin", "scheduler"),
		Agent:     filepath.Join(d.root, "bin", "node-agent"),
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
	for _, m := range machines {
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
	for _, m := range machines {
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
			case name == "unsatisfiable":
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

// showUnsatisfiable prints why the pod waits that cannot be satisfied.
func (d *demo) showUnsatisfiable(ctx context.Context) error {
	pods, err := d.lab.WaitForPods(ctx, namespace, []string{"unsatisfiable"}, "refused", podTimeout, lab.Unschedulable)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		fmt.Fprintf(d.out, "%s is %s: %s\n\n", pod.Name, corev1.PodPending, lab.SchedulingMessage(pod))
	}
	return nil
}

// places is where everything of the running demo is.
type places struct {
	kubectl, kubeconfig, schedulerURL, logs string
	nodes                                   []lab.NodePlaces
}

func (d *demo) places() places {
	return places{
		kubectl: d.lab.Binaries().Kubectl(), kubeconfig: d.lab.AdminKubeconfig(), schedulerURL: d.scheduler.URL,
		logs: d.lab.LogDir(), nodes: d.lab.Places(),
	}
}

// explainWait says where to look while the cluster runs.
func explainWait(out io.Writer, p places) {
	fmt.Fprintf(out, `The cluster runs until Ctrl-C, which stops and removes all of it.

kubectl     export KUBECONFIG=%s
            %s -n %s get pods,resourceclaims -o wide
scheduler   curl -k %s/readyz?verbose
logs        %s

`, p.kubeconfig, p.kubectl, namespace, p.schedulerURL, p.logs)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NODE\tWHAT\tWHERE")
	for _, node := range p.nodes {
		fmt.Fprintf(w, "%s\tagent's log\t%s\n\tagent's state\t%s\n\tsimulator\t%s\n", node.Node, node.AgentLog, node.StateDir, node.SimulatorSocket)
	}
	w.Flush()
	if len(p.nodes) > 0 {
		fmt.Fprintf(out, "\nA fault of a simulated GPU, for instance:\n  bin/nvmlsimctl --socket %s gpu lose 0\n", p.nodes[0].SimulatorSocket)
	}
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

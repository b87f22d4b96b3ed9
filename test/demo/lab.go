// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

// runLab runs the examples, says where everything is, and tells of each program that ends, until somebody ends the lab.
func (d *demo) runLab(ctx context.Context) error {
	if err := d.stages(ctx, []stage{{"run the examples", d.tryExamples}}); err != nil {
		return err
	}
	if err := d.stowage(ctx, 0, "gpus"); err != nil {
		return err
	}
	address, err := d.startMap(ctx)
	if err != nil {
		return err
	}
	p := d.places()
	p.mapURL = address
	d.untilEnded(ctx, p, d.lab.Watch)
	return nil
}

// mapAddress is what kubectl stowage map prints of where it is.
var mapAddress = regexp.MustCompile(`http://\S+#token=\S+`)

// startMap serves the live map of the cluster, and returns its address.
func (d *demo) startMap(ctx context.Context) (string, error) {
	address := ""
	log := filepath.Join(d.lab.LogDir(), "map.log")
	_, err := d.lab.StartProcess(ctx, localcluster.Command{
		Name: "map", Path: filepath.Join(d.root, "bin", "kubectl-stowage"), LogFile: log,
		Args: []string{"map", "--open=false", "--kubeconfig", d.lab.AdminKubeconfig()},
		Ready: func(context.Context) error {
			text, err := os.ReadFile(log)
			if err != nil {
				return err
			}
			if address = mapAddress.FindString(string(text)); address == "" {
				return errors.New("it has not said where it is")
			}
			return nil
		},
	})
	return address, err
}

// tryExamples applies the chosen ones, wave by wave, until each pod runs or is refused: whether it has a place depends on the nodes.
func (d *demo) tryExamples(ctx context.Context) error {
	for _, wave := range waves {
		var files, names []string
		for _, example := range wave {
			if d.examples == nil || slices.Contains(d.examples, example) {
				files = append(files, d.lab.Manifest("examples", example+".yaml"))
			}
		}
		if len(files) == 0 {
			continue
		}
		if _, err := d.lab.Kubectl(ctx, "apply", "--namespace="+namespace, "--filename="+strings.Join(files, ",")); err != nil {
			return err
		}
		pods, err := d.pods(ctx)
		if err != nil {
			return err
		}
		for name := range pods {
			names = append(names, name)
		}
		if _, err := d.lab.WaitForPods(ctx, namespace, names, "running or refused", podTimeout, func(pod *corev1.Pod) (bool, error) {
			running, err := lab.Running(pod)
			return running || lab.SchedulingMessage(pod) != "", err
		}); err != nil {
			return err
		}
	}
	return nil
}

// untilEnded waits until somebody ends the lab, which has succeeded so far, and tells of programs that end before.
func (d *demo) untilEnded(ctx context.Context, p places, watch func(context.Context, func(*localcluster.ExitError))) {
	d.waiting = true
	explainLab(d.out, p)
	watch(ctx, func(exit *localcluster.ExitError) {
		fmt.Fprintf(d.out, "\n%v\n", exit)
	})
	<-ctx.Done()
	fmt.Fprintln(d.out, "\nStopping the cluster.")
}

// withoutExits leaves out of joined errors those that say that a program had ended by itself.
func withoutExits(err error) error {
	switch wraps := err.(type) { //nolint:errorlint // what is wrapped is looked at below
	case nil, *localcluster.ExitError:
		return nil
	case interface{ Unwrap() []error }:
		var left []error
		for _, one := range wraps.Unwrap() {
			left = append(left, withoutExits(one))
		}
		return errors.Join(left...)
	case interface{ Unwrap() error }:
		if wraps.Unwrap() != nil && withoutExits(wraps.Unwrap()) == nil {
			return nil
		}
	}
	return err
}

// places is where everything of the running lab is.
type places struct {
	kubectl, kubeconfig, schedulerURL, mapURL, logs string
	nodes                                           []lab.NodePlaces
}

func (d *demo) places() places {
	return places{
		kubectl: d.lab.Binaries().Kubectl(), kubeconfig: d.lab.AdminKubeconfig(), schedulerURL: d.scheduler.URL,
		logs: d.lab.LogDir(), nodes: d.lab.Places(),
	}
}

// explainLab says where to look while the cluster runs.
func explainLab(out io.Writer, p places) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "The cluster runs until Ctrl-C, which stops and removes all of it.\n\n")
	fmt.Fprintf(w, "kubeconfig\texport KUBECONFIG=%s\n", p.kubeconfig)
	fmt.Fprintf(w, "kubectl\t%s -n %s get pods,resourceclaims -o wide\n", p.kubectl, namespace)
	fmt.Fprintf(w, "stowage\tbin/kubectl-stowage gpus\n\tbin/kubectl-stowage why %s -n %s\n", unsatisfiable, namespace)
	fmt.Fprintf(w, "map\t%s\n", p.mapURL)
	fmt.Fprintf(w, "scheduler\tcurl -k %s/readyz?verbose\n", p.schedulerURL)
	fmt.Fprintf(w, "logs\t%s\n", p.logs)
	for _, node := range p.nodes {
		fmt.Fprintf(w, "\nnode %s\tagent\tPID %d\n\tagent's log\t%s\n\tagent's state\t%s\n\tsimulator\t%s\n",
			node.Node, node.AgentPID, node.AgentLog, node.StateDir, node.SimulatorSocket)
		if len(node.Enter) > 0 {
			fmt.Fprintf(w, "\tenter it\t%s\n", strings.Join(node.Enter, " "))
		}
	}
	w.Flush()
	if len(p.nodes) > 0 {
		fmt.Fprintf(out, "\nA fault of a simulated GPU, for instance:\n  bin/nvmlsimctl --socket %s gpu lose 0\n", p.nodes[0].SimulatorSocket)
	}
}

// parseNodes reads "h100,a=l40s": machines of the demo, or a name and a profile of pkg/nvmlsim. The first node is the real one.
func parseNodes(text string) ([]machine, error) {
	var nodes []machine
	for word := range strings.SplitSeq(text, ",") {
		name, profile, given := strings.Cut(word, "=")
		m := machine{name: name, nvml: "sim:" + profile}
		if i := slices.IndexFunc(machines, func(m machine) bool { return m.name == name }); !given && i >= 0 {
			m = machines[i]
		} else if !given {
			return nil, fmt.Errorf("%q: want NAME=PROFILE, or one of h100, a100, b200, l40s", word)
		} else {
			simulated, err := nvmlsim.LoadProfile(profile)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", word, err)
			}
			m.gpus = len(simulated.GPUs)
		}
		if name == "" || slices.ContainsFunc(nodes, func(other machine) bool { return other.name == name }) {
			return nil, fmt.Errorf("%q: want a name that no other node has", word)
		}
		m.real = len(nodes) == 0
		nodes = append(nodes, m)
	}
	return nodes, nil
}

// parseExamples reads "one-gpu,shared-claim"; "none" is none.
func parseExamples(text string) ([]string, error) {
	names := []string{}
	if text == "none" {
		return names, nil
	}
	all := slices.Concat(waves...)
	for name := range strings.SplitSeq(text, ",") {
		if !slices.Contains(all, name) {
			return nil, fmt.Errorf("%q: want none, or some of %s", name, strings.Join(all, ", "))
		}
		names = append(names, name)
	}
	return names, nil
}

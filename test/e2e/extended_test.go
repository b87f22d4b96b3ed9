//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
)

// On a node with 4 GPUs, an init container and an app container that ask for 4 each share the same 4, which come from
// a claim that the scheduler made.
func TestInitAndAppContainerShareTheirExtendedResource(t *testing.T) {
	const name, gpus = "gb200", 4
	small, err := cluster.StartRealNode(t.Context(), name, "sim:gb200")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := small.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.WaitForSlices(t.Context(), name, gpus); err != nil {
		t.Fatal(err)
	}
	namespace := newNamespace(t)
	create := func(name string, initGPUs, appGPUs int64) pod {
		t.Helper()
		if _, err := cluster.AdminClient().CoreV1().Pods(namespace).Create(t.Context(), extendedPod(name, initGPUs, appGPUs), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		return pod{t: t, namespace: namespace, name: name}
	}

	p := create("four-and-four", gpus, gpus)
	p.waitRunning()
	row := p.check()
	if len(row.Allocated) != gpus || len(row.Claims) != 1 || !strings.HasPrefix(row.Claims[0], "four-and-four-extended-resources-") {
		t.Errorf("the pod has the devices %v of the claims %v", row.Allocated, row.Claims)
	}
	initSaw, appSees := p.report(small, "init"), p.report(small, "main")
	if diff := cmp.Diff(initSaw.Env, appSees.Env); diff != "" || len(appSees.Env) == 0 {
		t.Errorf("environment (-init +app):\n%s", diff)
	}
	if diff := cmp.Diff(initSaw.Devices, appSees.Devices); diff != "" || countGPUs(appSees) != gpus {
		t.Errorf("%d GPUs; devices (-init +app):\n%s", countGPUs(appSees), diff)
	}
	p.delete()

	// The init container of this one sees two of the four, as it would with a device plugin.
	p = create("two-and-four", 2, gpus)
	p.waitRunning()
	if saw, sees := countGPUs(p.report(small, "init")), countGPUs(p.report(small, "main")); saw != 2 || sees != gpus {
		t.Errorf("the init container saw %d GPUs, the app container sees %d, want 2 and %d", saw, sees, gpus)
	}
}

// extendedPod asks for GPUs as pods for a device plugin do, on the node with 4.
func extendedPod(name string, initGPUs, appGPUs int64) *corev1.Pod {
	container := func(name string, gpus int64, args ...string) corev1.Container {
		return corev1.Container{
			Name: name, Image: image.Probe, ImagePullPolicy: corev1.PullNever, Args: args,
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(gpus, resource.DecimalSI)}},
		}
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			SchedulerName:                 "stowage",
			NodeSelector:                  map[string]string{corev1.LabelHostname: "gb200"},
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			AutomountServiceAccountToken:  ptr.To(false),
			DNSPolicy:                     corev1.DNSDefault,
			InitContainers:                []corev1.Container{container("init", initGPUs, "once")},
			Containers:                    []corev1.Container{container("main", appGPUs)},
		},
	}
}

// report is what a container of the pod printed last. It waits for that: a container runs before its program does.
func (p pod) report(n *node.Node, container string) *report.Report {
	p.t.Helper()
	var printed *report.Report
	poll(p.t, fmt.Sprintf("container %s of pod %s has printed", container, p.name), func(ctx context.Context) error {
		log, err := n.PodLogs(ctx, p.namespace, p.name, container)
		if err == nil {
			printed, err = report.Last(strings.NewReader(log))
		}
		return err
	})
	return printed
}

// countGPUs counts the GPUs that the container was told of, one variable each.
func countGPUs(r *report.Report) int {
	n := 0
	for variable := range r.Env {
		if strings.HasPrefix(variable, "STOWAGE_") {
			n++
		}
	}
	return n
}

//go:build e2e

package node_test

import (
	"context"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/internal/localcluster/node"
)

func TestQuick(t *testing.T) {
	cluster, err := localcluster.Start(t.Context(), localcluster.Options{Progress: os.Stderr, Keep: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Stop()
	n, err := node.Start(t.Context(), cluster, node.Options{Name: "node-1"})
	if err != nil {
		t.Fatal(err)
	}
	pods := cluster.AdminClient().CoreV1().Pods("default")
	_, err = pods.Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec: corev1.PodSpec{
			NodeName: "node-1", DNSPolicy: corev1.DNSDefault, AutomountServiceAccountToken: ptr.To(false),
			Containers: []corev1.Container{{Name: "c", Image: "stowage.dev/probe:latest", ImagePullPolicy: corev1.PullNever,
				Env: []corev1.EnvVar{{Name: "STOWAGE_X", Value: "y"}}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	err = wait.PollUntilContextTimeout(t.Context(), time.Second, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		p, err := pods.Get(ctx, "p", metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		t.Log(p.Status.Phase)
		return p.Status.Phase == corev1.PodRunning, nil
	})
	if err != nil {
		t.Error(err)
	}
	log, err := n.PodLogs(t.Context(), "default", "p", "c")
	t.Log(log, err)
	begin := time.Now()
	if err := n.Stop(); err != nil {
		t.Error(err)
	}
	t.Log("stop", time.Since(begin))
}

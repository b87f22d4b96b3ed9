// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package localcluster runs a real Kubernetes control plane on this machine,
// from binaries that it builds itself out of Go modules: etcd, kube-apiserver
// (through controller-runtime's envtest), kube-controller-manager, and on
// request the stock kube-scheduler, our scheduler and our node agents. The
// demo, the integration and end-to-end tests and the benchmarks all use it.
//
//	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
//	defer stop()
//
//	cluster, err := localcluster.Start(ctx, localcluster.Options{Progress: os.Stderr})
//	if err != nil {
//		return err
//	}
//	defer cluster.Stop()
//
//	if err := cluster.Apply(ctx, "manifests/base/access"); err != nil {
//		return err
//	}
//	scheduler, err := cluster.StartScheduler(ctx, localcluster.SchedulerOptions{
//		Binary: "bin/scheduler",
//		Config: "manifests/scheduler-config/second-scheduler.yaml",
//	})
//	if err != nil {
//		return err // with the tail of the scheduler's log
//	}
//	pods, err := cluster.AdminClient().CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
//
// In a package of integration tests:
//
//	var cluster *localcluster.Cluster
//
//	func TestMain(m *testing.M) {
//		os.Exit(localcluster.RunTests(m, localcluster.Options{}, func(c *localcluster.Cluster) { cluster = c }))
//	}
//
// What it promises:
//
//   - Real security: TLS, Node and RBAC authorization, NodeRestriction and
//     ServiceAccount admission. Every component has an identity of its own; the
//     administrator's is for setup only. All servers listen on loopback.
//   - Nothing stays behind: Stop ends what was started in reverse order and by its
//     own process id, also after a failed start and when the context ends.
//     When our process is killed with SIGKILL the kernel kills its children
//     (PR_SET_PDEATHSIG), and the next Start removes the folder it left.
//   - Logs are files under [Cluster.LogDir]; an error about a process carries the
//     tail of its log.
//
// It needs Linux, and root only for real nodes.
//
// What it is not: a way to run workloads. Nodes are the business of the
// packages below it: node (kubelet and containerd) and hollow (no containers).
// It is for tests and demos, not for production: etcd does not sync to disk,
// and certificates and tokens live for a day.
package localcluster

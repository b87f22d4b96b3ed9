package sleepy

import (
	"testing"
	"time"
)

// Each test ends before it is looked at first, and together they take longer than the grace.
func sleep(t *testing.T) {
	time.Sleep(200 * time.Millisecond)
	if got := Max(5, 5); got != 5 {
		t.Errorf("Max(5, 5) = %d", got)
	}
}

func Test01(t *testing.T) { sleep(t) }
func Test02(t *testing.T) { sleep(t) }
func Test03(t *testing.T) { sleep(t) }
func Test04(t *testing.T) { sleep(t) }
func Test05(t *testing.T) { sleep(t) }
func Test06(t *testing.T) { sleep(t) }
func Test07(t *testing.T) { sleep(t) }
func Test08(t *testing.T) { sleep(t) }
func Test09(t *testing.T) { sleep(t) }
func Test10(t *testing.T) { sleep(t) }
func Test11(t *testing.T) { sleep(t) }
func Test12(t *testing.T) { sleep(t) }
func Test13(t *testing.T) { sleep(t) }
func Test14(t *testing.T) { sleep(t) }
func Test15(t *testing.T) { sleep(t) }
func Test16(t *testing.T) { sleep(t) }
func Test17(t *testing.T) { sleep(t) }
func Test18(t *testing.T) { sleep(t) }
func Test19(t *testing.T) { sleep(t) }
func Test20(t *testing.T) { sleep(t) }
func Test21(t *testing.T) { sleep(t) }
func Test22(t *testing.T) { sleep(t) }
func Test23(t *testing.T) { sleep(t) }
func Test24(t *testing.T) { sleep(t) }
func Test25(t *testing.T) { sleep(t) }
func Test26(t *testing.T) { sleep(t) }
func Test27(t *testing.T) { sleep(t) }
func Test28(t *testing.T) { sleep(t) }
func Test29(t *testing.T) { sleep(t) }
func Test30(t *testing.T) { sleep(t) }

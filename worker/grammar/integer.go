package grammar

import (
	"fmt"
	"strconv"
	"strings"
)

// most is the largest whole number that is written: 15 digits, which every JSON
// reader keeps exactly.
const most = 999_999_999_999_999

// integers is the expression of the whole numbers from low to high, which are
// within ±most and in order.
func integers(low, high int64) string {
	var options []string
	if low < 0 {
		options = append(options, `"-" `+natural(max(1, -high), -low))
	}
	if high >= 0 {
		options = append(options, natural(max(0, low), high))
	}
	return either(options)
}

// decimals is the expression of the numbers from low to high, with and without a
// fraction.
func decimals(low, high int64) string {
	const fraction = ` ("." [0-9]{1,15})?`
	// The outermost number has no fraction, those further in may have any.
	span := func(near, far int64) string {
		end := Literal(strconv.FormatInt(far, 10))
		if near == far {
			return end
		}
		return "(" + natural(near, far-1) + fraction + " | " + end + ")"
	}
	var options []string
	if low < 0 {
		options = append(options, `"-" `+span(max(0, -high), -low))
	}
	if high >= 0 {
		options = append(options, span(max(0, low), high))
	}
	return either(options)
}

// natural is the expression of the whole numbers from low to high, 0 <= low <= high.
func natural(low, high int64) string {
	var options []string
	first := int64(0)
	for next := int64(10); ; next *= 10 {
		if a, b := max(low, first), min(high, next-1); a <= b {
			options = append(options, digits(strconv.FormatInt(a, 10), strconv.FormatInt(b, 10)))
		}
		if high < next {
			return either(options)
		}
		first = next
	}
}

// digits is the expression of the numbers between two of the same length.
func digits(low, high string) string {
	n := len(low)
	switch {
	case low == high:
		return Literal(low)
	case n == 1:
		return fmt.Sprintf("[%s-%s]", low, high)
	case low[0] == high[0]:
		return Literal(low[:1]) + " " + digits(low[1:], high[1:])
	}
	zeros, nines := strings.Repeat("0", n-1), strings.Repeat("9", n-1)
	var options []string
	a, b := low[0], high[0]
	if low[1:] != zeros {
		options = append(options, Literal(low[:1])+" "+digits(low[1:], nines))
		a++
	}
	if high[1:] != nines {
		b--
	}
	if a <= b {
		options = append(options, fmt.Sprintf("[%c-%c] %s", a, b, repeat("[0-9]", n-1, n-1)))
	}
	if high[1:] != nines {
		options = append(options, Literal(high[:1])+" "+digits(zeros, high[1:]))
	}
	return either(options)
}
